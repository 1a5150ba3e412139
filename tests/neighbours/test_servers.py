"""Under each server: the five, one run of many requests, renewals, and clients that leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from tests.acceptance.conftest import end
from tests.acceptance.shop import TIMEOUT, Served, engine_options, failures, replayed
from tests.neighbours.five import the_five
from tests.neighbours.servers import UwsgiServer, WaitressServer
from tests.neighbours.wire import case_of
from tests.support.apps import close, make_shop, new_key, until
from tests.support.barrier import background, together
from tests.support.server import GunicornServer, Server

pytestmark = pytest.mark.thorough

#: A lease whose renewal a test can wait for, and long enough for a process that shares two cores with others.
LEASE = 2.0


class Setting(NamedTuple):
    """A server with its options, and the database that it serves the app on."""

    server: Callable[..., Server]
    database: str
    options: dict[str, Any]
    #: How a view is ended there before it can finish.
    crash: str = "exit"
    #: Whether the app takes a claim where it is made, before workers are forked.
    warm: bool = False


_GEVENT = {"worker_class": "gevent"}

SETTINGS = {
    "gunicorn-sync": Setting(GunicornServer, "sqlite", {"workers": 3, "preload": True}),
    "gunicorn-gthread": Setting(GunicornServer, "psycopg", {"worker_class": "gthread", "threads": 8}),
    "gunicorn-gevent": Setting(GunicornServer, "sqlite", _GEVENT, "timeout"),
    "gunicorn-gevent-psycopg": Setting(GunicornServer, "psycopg", _GEVENT, "timeout"),
    "waitress": Setting(WaitressServer, "sqlite", {"threads": 8}),
    "uwsgi-threads": Setting(UwsgiServer, "psycopg2", {"options": ["--threads=8", "--lazy-apps"]}),
    "uwsgi-processes": Setting(UwsgiServer, "sqlite", {"workers": 3}, "harakiri", warm=True),
}


@contextlib.contextmanager
def serving(url: str, folder: Path, setting: Setting) -> Iterator[Served]:
    """The app under a server on a database, until the end."""
    shop = make_shop(url, engine_options=engine_options(url))
    config = {"lock_timeout": LEASE, "pool_size": 3}
    app = "tests.neighbours.served:create_warm_app()" if setting.warm else "tests.neighbours.served:create_app()"
    served = Served(folder, url, config, setting.server, shop, [], app=app)
    try:
        served.start(**setting.options)
        yield served
    finally:
        for one in served.servers:
            end(one)
            one.stop()
            print(f"--- {one.url}\n{one.log}")
        close(shop.app)


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request: pytest.FixtureRequest) -> Setting:
    """Each server."""
    return SETTINGS[request.param]


@pytest.fixture(scope="module")
def served(
    setting: Setting, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The app under the server, which the tests of this module share."""
    folder = tmp_path_factory.mktemp("served")
    if setting.database == "sqlite":
        with serving(f"sqlite:///{folder / 'shop.sqlite'}", folder, setting) as one:
            yield one
        return
    database = request.getfixturevalue("postgres_server")
    name = database.create_database()
    try:
        with serving(database.url(name, setting.database), folder, setting) as one:
            yield one
    finally:
        database.drop_database(name)


@pytest.mark.scenario(51, 65)
def test_the_five(served: Served) -> None:
    """The five hold over the wire."""
    the_five(case_of(served))


@pytest.mark.scenario(1, 2, 65)
def test_one_run_of_many(served: Served) -> None:
    """Of twenty identical requests one runs, renewed while it does, and the others get 409; then all get replays."""
    key = new_key()
    before = len(served.logs)
    answers: list[requests.Response] = []
    with served.held(key):
        asked = background(together, 20, lambda _: answers.append(served.ask(key)))
        until(lambda: len(answers) == 19, 20)
        begun = served.row(key)["locked_at"]
        until(lambda: served.row(key)["locked_at"] > begun)
        assert 409 == served.ask(key).status_code
        assert 201 == served.ask(new_key()).status_code
    asked.result(20)
    assert {(409, "2")} == {(one.status_code, one.headers["Retry-After"]) for one in answers[:19]}
    first = answers[19]
    assert {(201, True, first.content)} == {
        (one.status_code, replayed(one), one.content) for one in together(8, lambda _: served.ask(key))
    }
    assert (201, 1, 1) == (first.status_code, len(served.runs(key)), served.row(key)["attempts"])
    assert [] == failures(served.logs[before:])


@pytest.mark.scenario(64)
def test_a_client_that_leaves(served: Served) -> None:
    """A view whose client is gone runs to its end: 409 meanwhile, then the replay."""
    key = new_key()
    with served.held(key):
        with connected(served, key, "/work"):
            served.running(key)
        assert 409 == served.ask(key).status_code
    until(lambda: served.row(key)["status"] == "completed", 20)
    retry = served.ask(key)
    assert (201, True, 1) == (retry.status_code, replayed(retry), len(served.runs(key)))


@pytest.mark.scenario(38, 40)
def test_a_stream(served: Served) -> None:
    """A stream passes part by part and is recorded whole, also when the client leaves after its first part."""
    whole = b"a" * 1000 + b"b" * 1000 + b"c" * 1000
    keys = new_key(), new_key()
    assert (201, whole) == (
        served.ask(keys[0], path="/stream").status_code,
        served.ask(keys[0], path="/stream").content,
    )
    with served.held(keys[1]):
        with connected(served, keys[1], "/stream") as connection:
            parts = b""
            while b"a" * 1000 not in parts:
                parts += connection.recv(4096)
        assert b"b" not in parts.partition(b"a" * 1000)[2]
        assert 409 == served.ask(keys[1], path="/stream").status_code
    until(lambda: served.row(keys[1])["status"] == "completed", 20)
    retries = [served.ask(key, path="/stream") for key in keys]
    assert [(201, True, whole)] * 2 == [(one.status_code, replayed(one), one.content) for one in retries]
    assert [1, 1] == [len(served.runs(key)) for key in keys]


@pytest.mark.scenario(28)
@pytest.mark.parametrize("sent", ["with a length", "in chunks"])
def test_large_bodies(served: Served, setting: Setting, sent: str) -> None:
    """A body of a megabyte counts to its last byte, and the view reads it; in chunks, too, or it is refused."""

    def ask(key: str, last: str) -> requests.Response:
        body = f'{{"amount": 100, "note": "{"x" * 2**20}{last}"}}'.encode()
        parts = (body[start : start + 2**16] for start in range(0, len(body), 2**16))
        headers = {"Idempotency-Key": key, "X-Tenant": "acme", "Content-Type": "application/json"}
        url = f"{served.servers[0].url}/work"
        return requests.post(url, parts if sent == "in chunks" else body, headers=headers, timeout=TIMEOUT)

    key = new_key()
    answers = [ask(key, last) for last in "aab"]
    if sent == "in chunks" and setting.server is UwsgiServer:  # it reads none unless it is told to, by an option
        assert ([411] * 3, []) == ([one.status_code for one in answers], served.runs(key))
        return
    assert [(201, False), (201, True), (422, False)] == [(one.status_code, replayed(one)) for one in answers]
    assert 1 == len(served.runs(key))


@contextlib.contextmanager
def connected(served: Served, key: str, path: str, more: dict[str, str] | None = None) -> Iterator[socket.socket]:
    """A client that has asked, as its socket. In the end it leaves without another word."""
    connection = http.client.HTTPConnection(served.servers[0].host, served.servers[0].port, timeout=20)
    with contextlib.closing(connection):
        headers = {"Idempotency-Key": key, "X-Tenant": "acme", "Content-Type": "application/json", **(more or {})}
        connection.request("POST", path, json.dumps({"amount": 100}), headers)
        yield connection.sock


@pytest.mark.scenario(66)
def test_a_crash(served: Served, setting: Setting) -> None:
    """A view that the server ends, or that exits, leaves its claim: 409 until the lease is over, then one takeover."""
    key = new_key()

    def ask(_: int) -> requests.Response:
        headers = {"Idempotency-Key": key, "X-Tenant": "acme", "X-Crash": setting.crash}
        url = f"{served.servers[0].url}/crash"
        for _ in range(20):
            # A worker that is about to end may take a request, and answer none.
            with contextlib.suppress(requests.ConnectionError):
                return requests.post(url, json={"amount": 100}, headers=headers, timeout=TIMEOUT)
        raise AssertionError("The server does not answer any more.")

    with connected(served, key, "/crash", {"X-Crash": setting.crash}):
        pid = served.running(key)
        if setting.crash == "harakiri":
            until(lambda: pid not in served.servers[0].pids, 20)
    assert 409 == ask(0).status_code
    assert ("in_progress", 0) == (served.row(key)["status"], served.logged("release", key))
    served.shop.shift(60)
    ran = [one for one in together(4, ask) if one.status_code == 201 and not replayed(one)]
    assert 1 == len(ran)
    retry = ask(0)
    assert (201, True, ran[0].content) == (retry.status_code, replayed(retry), retry.content)
    assert (2, 1) == (len(served.runs(key)), served.logged("takeover", key))


def test_nothing_went_wrong(served: Served) -> None:
    """In all of this no claim was lost, and no server was said to be unfit: threads run in each of them."""
    assert "idempotency.lost" not in served.logs
    assert "enable-threads" not in served.logs
