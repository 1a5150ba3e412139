"""Contexts that tests and shells push, that clients preserve and threads copy: the extension works in all of them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from flask import Flask, Response, copy_current_request_context, g, request, stream_with_context
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from flask_idempotency.heartbeat import heartbeat
from flask_idempotency.signals import executed
from tests.support.apps import Shop, events, make_shop, new_key
from tests.support.barrier import background


def send(shop: Shop, key: str, path: str = "/x", **options: Any) -> TestResponse:
    """A request of the tenant ``acme``."""
    headers = {"Idempotency-Key": key, "X-Tenant": "acme", **options.pop("headers", {})}
    return shop.client.post(path, headers=headers, **options)


def add(shop: Shop, view: Callable[..., Any], path: str = "/x") -> None:
    """A guarded view."""
    shop.app.add_url_rule(path, path, shop.idempotency.required(view), methods=["POST"])


def assert_replayed(answer: TestResponse | Response, first: TestResponse | Response) -> None:
    """Assert that an answer is the replay of the first one."""
    assert (first.status_code, first.get_data()) == (answer.status_code, answer.get_data())
    assert "true" == answer.headers["Idempotent-Replay"]


def pushed(shop: Shop, kind: str) -> ExitStack:
    """Contexts that are pushed around requests of a test."""
    stack = ExitStack()
    if "app" in kind:
        stack.enter_context(shop.app.app_context())
    if "request" in kind:
        stack.enter_context(shop.app.test_request_context("/of-the-test", method="POST"))
    return stack


PUSHED = ["app", "request", "app and request"]


@pytest.fixture
def patient(make: Callable[..., Shop], database_url: str) -> Shop:
    """A shop that waits for SQLite's writer for longer than pytest lets a test take."""
    return make(engine_options={"connect_args": {"timeout": 90}} if "sqlite" in database_url else None)


# Pushed around the client


@pytest.mark.parametrize("kind", PUSHED)
def test_requests_within_a_pushed_context(shop: Shop, kind: str) -> None:
    """Inside a pushed context the record is visible to the next request, and mismatches and other keys are as ever."""
    with pushed(shop, kind):
        key = new_key()
        first = shop.charge(key)
        assert_replayed(shop.charge(key), first)
        assert 422 == shop.charge(key, amount=900).status_code
        assert 201 == shop.charge(new_key()).status_code
        assert 2 == shop.db.session.query(shop.Charge).count()
        assert shop.idempotency.current is None
    assert_replayed(shop.charge(key), first)


@pytest.mark.parametrize("kind", PUSHED)
def test_a_view_that_only_flushes_within_a_pushed_context(patient: Shop, kind: str) -> None:
    """Inside a pushed context, where the view's open transaction outlives its request, the record is there at once."""
    shop = patient
    add(shop, lambda: (shop.db.session.add(shop.Charge(amount=1)), shop.db.session.flush()) and "flushed")
    with pushed(shop, kind):
        key = new_key()
        first = send(shop, key)
        assert_replayed(send(shop, key), first)
        assert 422 == send(shop, key, json={"a": 1}).status_code
        assert 1 == shop.db.session.query(shop.Charge).count()
        assert 0 == shop.charges()
    assert_replayed(send(shop, key), first)
    assert 0 == shop.charges()


@pytest.mark.parametrize("kind", PUSHED)
def test_writes_of_the_test_itself(patient: Shop, kind: str) -> None:
    """What a test has added and not committed stays pending and uncommitted; one writer's database says 503 at once."""
    shop = patient
    add(shop, lambda: "x")
    sqlite = "sqlite" in shop.app.config["SQLALCHEMY_DATABASE_URI"]
    with pushed(shop, kind):
        shop.db.session.add(shop.Charge(amount=7))
        assert 200 == send(shop, new_key()).status_code
        shop.db.session.flush()
        answer = send(shop, new_key())
        assert (503 if sqlite else 200) == answer.status_code
        assert 0 == shop.charges()
        shop.db.session.commit()
        assert 200 == send(shop, new_key()).status_code
    assert 1 == shop.charges()


@pytest.mark.parametrize("kind", PUSHED)
@pytest.mark.parametrize("testing", [True, False])
def test_a_view_that_raises_within_a_pushed_context(shop: Shop, kind: str, testing: bool) -> None:
    """Inside a pushed context a view that raised can be run again, by the same key."""
    runs: list[str] = []

    def view() -> str:
        runs.append("x")
        if len(runs) == 1:
            raise ZeroDivisionError
        return "x"

    add(shop, view)
    shop.app.testing = testing
    with pushed(shop, kind):
        key = new_key()
        if testing:
            with pytest.raises(ZeroDivisionError):
                send(shop, key)
        else:
            assert 500 == send(shop, key).status_code
        first = send(shop, key)
        assert_replayed(send(shop, key), first)
    assert 2 == len(runs)


def test_signals_within_a_pushed_request_context(light: Shop) -> None:
    """A receiver that runs when the request is over finds its attempt, not that of the context around."""
    found: list[Any] = []
    key = new_key()
    with light.app.test_request_context("/of-the-test"), events(light.app) as seen:

        def receive(sender: Any, **_: Any) -> None:
            found.append(light.idempotency.current and light.idempotency.current.key)

        with executed.connected_to(receive, sender=light.app):
            light.charge(key)
    assert ([key], ["executed"]) == (found, [name for name, _ in seen])


# pytest-flask


class TestUnderPytestFlask:
    """As an app's own suite has it: pytest-flask pushes a request context around each test, and gives a client."""

    @pytest.fixture
    def shop_on_postgres_or_sqlite(self, database_url: str) -> Shop:
        """A shop on each engine and driver."""
        shop = make_shop(database_url)
        add(shop, lambda: (shop.db.session.add(shop.Charge(amount=1)), shop.db.session.flush()) and {"a": 1}, "/flush")
        return shop

    @pytest.fixture
    def app(self, shop_on_postgres_or_sqlite: Shop) -> Flask:
        """What pytest-flask asks for."""
        shop_on_postgres_or_sqlite.app.testing = True
        return shop_on_postgres_or_sqlite.app

    @pytest.mark.parametrize("path", ["/charges", "/flush"])
    def test_two_requests(self, client: FlaskClient, path: str) -> None:
        """A retry is the replay, whether the view committed or only flushed."""
        headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
        first, retry = (client.post(path, json={"amount": 1}, headers=headers) for _ in range(2))
        assert (first.json, "true") == (retry.json, retry.headers["Idempotent-Replay"])


# Preserved by the client


def test_a_client_that_preserves_its_context(shop: Shop) -> None:
    """In a ``with`` block of the client each request's context lives on; its attempt is the current one until then."""
    key, other = new_key(), new_key()
    headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
    with shop.client as client:
        first = client.post("/charges", json={"amount": 1}, headers=headers)
        assert shop.idempotency.current is not None
        assert (key, False) == (shop.idempotency.current.key, shop.idempotency.current.replay)
        retry = client.post("/charges", json={"amount": 1}, headers=headers)
        assert shop.idempotency.current.replay
        client.post("/charges", json={"amount": 1}, headers={**headers, "Idempotency-Key": other})
        assert other == shop.idempotency.current.key
        client.get("/none")
        assert shop.idempotency.current is None
    assert_replayed(retry, first)
    assert ["completed", "completed"] == [row["status"] for row in shop.rows()]
    assert shop.idempotency.current is None


def test_a_view_that_raises_in_a_preserved_context(light: Shop) -> None:
    """A preserved context's end, which comes long after the request's, ends no later claim of the same key."""
    answers: list[Any] = [ZeroDivisionError, "x"]

    def view() -> str:
        answer = answers.pop(0)
        if answer is ZeroDivisionError:
            raise ZeroDivisionError
        return str(answer)

    add(light, view)
    light.app.testing = True
    headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
    with light.client as client:
        with pytest.raises(ZeroDivisionError):
            client.post("/x", headers=headers)
        first = client.post("/x", headers=headers)
    assert_replayed(light.client.post("/x", headers=headers), first)


# A bare request context


def bare(shop: Shop, key: str, path: str = "/charges", **options: Any) -> Any:
    """A request context of the tenant ``acme`` that no WSGI server made."""
    headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
    options = {"json": {"amount": 100}, **options}
    return shop.app.test_request_context(path, method="POST", headers=headers, **options)


def test_a_full_dispatch_in_a_bare_context(shop: Shop) -> None:
    """A request dispatched in a bare context is recorded and replayed, there and by a client."""
    key = new_key()
    with bare(shop, key):
        first = shop.app.full_dispatch_request()
        assert 201 == first.status_code
    with bare(shop, key):
        assert_replayed(shop.app.full_dispatch_request(), first)
    assert_replayed(shop.charge(key), first)
    assert 1 == shop.charges() == len(shop.runs)


@pytest.mark.parametrize("propagate", [True, False])
def test_a_failing_dispatch_in_a_bare_context(light: Shop, propagate: bool) -> None:
    """A view that raises in a bare context releases its claim when the context ends."""
    runs: list[str] = []

    def view() -> str:
        runs.append("x")
        if len(runs) == 1:
            raise ZeroDivisionError
        return "x"

    add(light, view)
    key = new_key()
    if propagate:
        with pytest.raises(ZeroDivisionError), bare(light, key, "/x"):
            light.app.full_dispatch_request()
    else:
        with bare(light, key, "/x"):
            with pytest.raises(ZeroDivisionError) as caught:
                light.app.full_dispatch_request()
            assert 500 == light.app.handle_exception(caught.value).status_code
    assert [] == light.rows()
    assert 200 == send(light, key, json={"amount": 100}).status_code


def test_a_crash_in_a_bare_context(light: Shop) -> None:
    """An exception that is no Exception leaves the claim to its lease."""

    def view() -> str:
        raise KeyboardInterrupt

    add(light, view)
    key = new_key()
    with pytest.raises(KeyboardInterrupt), bare(light, key, "/x"):
        light.app.full_dispatch_request()
    (row,) = light.rows()
    assert ("in_progress", False) == (row["status"], heartbeat.holds(row["fencing_token"]))


@pytest.mark.parametrize("call", ["dispatch_request", "view"])
def test_an_answer_that_nobody_makes(light: Shop, call: str) -> None:
    """A view that is called in a bare context without an answer being made leaves its claim to the lease."""
    key = new_key()
    with bare(light, key):
        view: Any = light.app.view_functions["create_charge"] if call == "view" else light.app.dispatch_request
        assert 201 == view()[1]
    (row,) = light.rows()
    assert ("in_progress", False) == (row["status"], heartbeat.holds(row["fencing_token"]))
    assert 409 == light.charge(key).status_code
    light.shift(31)
    assert 201 == light.charge(key).status_code


def test_a_stream_in_a_bare_context(light: Shop) -> None:
    """A streamed answer in a bare context is recorded when it is closed."""
    add(light, lambda: Response(iter(["a", "b", "c"])))
    key = new_key()
    with bare(light, key, "/x"):
        first = light.app.full_dispatch_request()
        assert ["in_progress"] == [row["status"] for row in light.rows()]
        assert b"abc" == first.get_data()
        first.close()
    assert b"abc" == send(light, key, json={"amount": 100}).data
    assert ["completed"] == [row["status"] for row in light.rows()]


def test_a_hook_alone_in_a_bare_context(light: Shop) -> None:
    """Running the hooks by hand, as some tests do, takes no claim."""
    with bare(light, new_key()):
        assert light.app.preprocess_request() is None
        assert 200 == light.app.process_response(Response("x")).status_code
    assert [] == light.rows()


# Copied to a thread


@pytest.mark.parametrize("around", ["client", "bare"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_copied_context_that_ends_within_the_view(light: Shop, around: str, fails: bool) -> None:
    """A thread with a copy of the request's context shares its attempt, and ends nothing by its end or its error."""
    seen: list[Any] = []

    def view() -> str:
        @copy_current_request_context
        def work() -> None:
            seen.append((light.idempotency.current, request.headers["X-Tenant"]))
            if fails:
                raise ZeroDivisionError

        future = background(work)
        assert (ZeroDivisionError if fails else type(None)) is type(future.exception(10))
        (row,) = light.rows()
        seen.append((light.idempotency.current, row["status"]))
        assert heartbeat.holds(row["fencing_token"])
        return "x"

    add(light, view)
    key = new_key()
    if around == "client":
        first: Any = send(light, key, json={"amount": 100})
    else:
        with bare(light, key, "/x"):
            first = light.app.full_dispatch_request()
    assert 200 == first.status_code
    assert (seen[0][0], "acme", seen[0][0], "in_progress") == (seen[1][0], seen[0][1], seen[1][0], seen[1][1])
    assert seen[0][0] is not None
    assert_replayed(send(light, key, json={"amount": 100}), first)


def test_a_copied_context_that_outlives_the_request(light: Shop) -> None:
    """A thread whose copied context ends long after the request changes nothing of its record."""
    go, futures = threading.Event(), []

    def view() -> str:
        @copy_current_request_context
        def work() -> Any:
            assert go.wait(20)
            raise ZeroDivisionError

        futures.append(background(work))
        return "x"

    add(light, view)
    key = new_key()
    first = send(light, key)
    before = light.rows()
    go.set()
    assert isinstance(futures[0].exception(10), ZeroDivisionError)
    assert before == light.rows()
    assert_replayed(send(light, key), first)


def test_current_in_a_stream(light: Shop) -> None:
    """In a stream with context, which runs when the request is over, ``current`` is its attempt."""

    def view() -> Response:
        def generate() -> Iterator[str]:
            current = light.idempotency.current
            yield "none" if current is None else current.key

        return Response(stream_with_context(generate()))

    add(light, view)
    key = new_key()
    assert [key, key] == [send(light, key).text for _ in range(2)]


def test_g_is_the_views_own(light: Shop) -> None:
    """The extension leaves nothing on ``g``, and does not touch the session."""
    left: list[Any] = []
    add(light, lambda: left.append(list(g)) or "x")
    key = new_key()
    for _ in range(2):
        answer = send(light, key)
        assert {"Set-Cookie", "Vary"}.isdisjoint(answer.headers.keys())
    assert [[]] == left


def test_attempts_are_let_go(light: Shop) -> None:
    """When a request is over nothing of the extension keeps its attempt alive, answered or refused."""
    kept: list[weakref.ref[Any]] = []
    add(light, lambda: kept.append(weakref.ref(light.idempotency.current)) or "x")
    key = new_key()
    for options in ({}, {}, {"json": {"a": 1}}):
        send(light, key, **options)
    gc.collect()
    assert [None] == [one() for one in kept]
