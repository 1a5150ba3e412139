"""The example's page as its server sees it: its files, answers that get lost, and the twin without a guard."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from examples.payments.shop import POLICY, create_app
from tests.support.apps import close, new_key

CHARGE = {"amount": 4200, "currency": "EUR", "card": "card-4242"}
LOSE = {"Lose-Answer": "true"}


@pytest.fixture
def shop(sqlite_url: str) -> Iterator[Flask]:
    """The shop with its page on a fresh database, with a provider that takes no time."""
    app = create_app({"SQLALCHEMY_DATABASE_URI": sqlite_url, "PROVIDER_DELAY": 0})
    yield app
    close(app)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: the server's and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=5)
        server, _ = listener.accept()
    with server, client:
        yield server, client


def visitor(shop: Flask) -> FlaskClient:
    """A client with a token and a ledger of its own."""
    client = shop.test_client()
    token = client.post("/visits").get_json()["token"]
    client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {token}"
    return client


def charge(
    client: FlaskClient, key: str, path: str = "/charges", lose: bool = False, server: socket.socket | None = None
) -> TestResponse:
    """Pay, over a connection whose server's end is ``server``."""
    headers = {"Idempotency-Key": key, **(LOSE if lose else {})}
    overrides = {"gunicorn.socket": server} if server else {}
    return client.post(path, json=CHARGE, headers=headers, environ_overrides=overrides)


def ledger(client: FlaskClient) -> list[int]:
    """The amounts that the visitor was charged."""
    return [one["amount"] for one in client.get("/charges").get_json()["charges"]]


def test_files(shop: Flask) -> None:
    """The page and all files it names are there, under a policy that allows its own files and requests alone."""
    client = shop.test_client()
    page = client.get("/", buffered=True)
    assert (200, "text/html") == (page.status_code, page.mimetype)
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert 3 == len(files)
    for answer in (page, *(client.get(file, buffered=True) for file in files)):
        assert (200, POLICY) == (answer.status_code, answer.headers["Content-Security-Policy"])
        assert "nosniff" == answer.headers["X-Content-Type-Options"]
    assert "unsafe" not in POLICY
    assert not re.search(r"<style|<script(?![^>]* src=)| style=| on\w+=", page.text)


def test_lost_answer(shop: Flask, connection: tuple[socket.socket, socket.socket]) -> None:
    """A lost answer leaves the charge and the record, and the client nothing; the retry gets the replay."""
    (server, client_end), client, key = connection, visitor(shop), new_key()
    with pytest.raises(BrokenPipeError):
        charge(client, key, lose=True, server=server)
    assert b"" == client_end.recv(1)
    assert [4200] == ledger(client)
    retry = charge(client, key)
    assert (201, "true") == (retry.status_code, retry.headers["Idempotent-Replay"])
    assert [4200] == ledger(client)


def test_lost_answer_to_one_who_left(shop: Flask, connection: tuple[socket.socket, socket.socket]) -> None:
    """An answer is lost all the same where the client has gone away before."""
    (server, client_end), client = connection, visitor(shop)
    client_end.close()
    server.shutdown(socket.SHUT_RDWR)
    with pytest.raises(BrokenPipeError):
        charge(client, new_key(), lose=True, server=server)
    assert [4200] == ledger(client)


def test_one_answer_a_connection(shop: Flask, connection: tuple[socket.socket, socket.socket]) -> None:
    """A connection ends after an answer that is not lost, but not before the whole answer was sent."""
    server, client_end = connection
    answer = charge(visitor(shop), new_key(), server=server)
    server.sendall(b"the answer")
    assert 201 == answer.status_code
    assert b"the answer" == client_end.recv(100)
    answer.close()
    assert b"" == client_end.recv(1)


def test_no_connection_to_cut(shop: Flask) -> None:
    """Under a server that does not show its connection, a request to lose the answer is refused and charges nothing."""
    client = visitor(shop)
    assert 501 == charge(client, new_key(), lose=True).status_code
    assert [] == ledger(client)


def test_unguarded_twin(shop: Flask) -> None:
    """The twin charges each time it is asked, whatever the key, and only who has a token."""
    client, key = visitor(shop), new_key()
    answers = [charge(client, key, "/unguarded/charges") for _ in range(2)]
    assert [(201, None)] * 2 == [(one.status_code, one.headers.get("Idempotent-Replay")) for one in answers]
    assert [4200, 4200] == ledger(client)
    assert client.get(answers[1].headers["Location"]).get_json() == answers[1].get_json()
    assert 401 == charge(shop.test_client(), key, "/unguarded/charges").status_code


def test_visitors(shop: Flask) -> None:
    """Each visitor has a ledger of their own, and no cache keeps a token."""
    first, second = visitor(shop), visitor(shop)
    charge(first, new_key())
    assert [[4200], []] == [ledger(first), ledger(second)]
    assert "no-store" == shop.test_client().post("/visits").headers["Cache-Control"]


def test_no_route_is_forgotten(shop: Flask) -> None:
    """What the shop leaves unguarded is exempt: the command that looks for forgotten routes finds none."""
    done = shop.test_cli_runner().invoke(args=["idempotency", "routes", "--check"])
    assert (0, "Nothing is forgotten: 4 routes with POST or PATCH.\n") == (done.exit_code, done.output)
