"""Atomic views that call guarded functions, make requests of their own, or hand their environ on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, request
from flask_sqlalchemy.session import Session

from flask_idempotency.errors import ConfigurationError, WorkPending
from tests.support.apps import Shop, assert_replayed, close, guard, make_shop, new_key, send
from tests.support.barrier import background
from tests.support.charges import amounts
from tests.support.guarded import commit

pytestmark = pytest.mark.one_driver

CONFLICT = sa.text("DO $$ BEGIN RAISE EXCEPTION 'as if' USING ERRCODE = '40001'; END $$")
Make = Callable[..., Shop]


@pytest.fixture(params=["postgres_url", "psycopg_url"])
def make_postgres(request: pytest.FixtureRequest) -> Iterator[Make]:
    """A function that makes shops on a fresh PostgreSQL database."""
    shops: list[Shop] = []

    def build(**config: Any) -> Shop:
        shops.append(make_shop(request.getfixturevalue(request.param), **config))
        return shops[-1]

    yield build
    for shop in shops:
        close(shop.app)


def checked_out(shop: Shop) -> int:
    """How many connections of the app's pool are in use."""
    with shop.app.app_context():
        return int(shop.db.engine.pool.checkedout())  # type: ignore[attr-defined]


# Guarded functions that atomic views call


@pytest.mark.parametrize("inner_options", [{"atomic": True, "atomic_retries": 2}, {}], ids=["atomic", "default"])
def test_a_conflict_in_an_inner_guard(make_postgres: Make, inner_options: dict[str, Any]) -> None:
    """A conflict in a guarded function within an atomic view runs the whole view again, not the function alone."""
    shop = make_postgres()

    @shop.idempotency.required(**inner_options)
    def inner() -> Any:
        shop.runs.append("inner")
        commit(shop, 200)
        if len(shop.runs) == 2:
            shop.db.session.execute(CONFLICT)
        return {"inner": 1}, 201

    def outer() -> Any:
        shop.runs.append("outer")
        commit(shop, 100)
        return inner()

    guard(shop, outer, atomic=True, atomic_retries=2)
    key = new_key()
    first = send(shop, key)
    assert (201, ["outer", "inner"] * 2) == (first.status_code, shop.runs)
    assert [100, 200] == amounts(shop)
    assert_replayed(send(shop, key), first)


@pytest.mark.parametrize("retries", [0, 1])
def test_an_outer_view_that_catches_a_conflict(make_postgres: Make, retries: int) -> None:
    """A conflict that the outer view catches and rolls back is the view's own business: its success has its record."""
    shop = make_postgres()

    @shop.idempotency.required(atomic=True)
    def inner() -> None:
        shop.db.session.execute(CONFLICT)

    def outer() -> Any:
        commit(shop, 100)
        try:
            inner()
        except Exception:
            shop.db.session.rollback()
        commit(shop, 300)
        return "caught", 201

    guard(shop, outer, atomic=True, atomic_retries=retries)
    key = new_key()
    first = send(shop, key)
    assert (201, [100, 300]) == (first.status_code, amounts(shop))
    assert ["completed"] == [row["status"] for row in shop.rows()]
    assert_replayed(send(shop, key), first)
    assert [100, 300] == amounts(shop)


def test_a_decorator_that_makes_a_success_of_it(make_postgres: Make) -> None:
    """A decorator above the guard that answers 201 instead of the guard's 503 does not reach the client."""
    shop = make_postgres()

    @shop.idempotency.required(atomic=True)
    def view() -> None:
        commit(shop)
        shop.db.session.execute(CONFLICT)

    @functools.wraps(view)
    def forgiving() -> Any:
        try:
            return view()
        except Exception:
            return "all is well", 201

    shop.app.add_url_rule("/x", "x", forgiving, methods=["POST"])
    answer = send(shop, new_key())
    assert (503, True) == (answer.status_code, "Retry-After" in answer.headers)
    assert ([], []) == (amounts(shop), shop.rows())


# Requests that atomic views make


@pytest.mark.parametrize("inner_is_atomic", [True, False])
def test_a_request_within_a_view(make_postgres: Make, inner_is_atomic: bool) -> None:
    """A guarded request in the atomic view's own app context is refused, and the view's session stays as it was."""
    shop = make_postgres(engine_options={"pool_size": 1, "max_overflow": 0, "pool_timeout": 5})
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    seen: list[BaseException | None] = []
    shop.app.register_error_handler(WorkPending, lambda error: (seen.append(error), ("pending", 500))[1])
    guard(shop, lambda: commit(shop, 2), "/inner", atomic=inner_is_atomic)

    def outer() -> Any:
        commit(shop, 1)
        bound = shop.db.session().__dict__["get_bind"]
        inner = send(shop, new_key(), "/inner", client=shop.app.test_client())
        assert bound is shop.db.session().__dict__["get_bind"]
        commit(shop, 3)
        return f"{inner.status_code} {inner.text}", 201

    guard(shop, outer, "/outer", atomic=True)
    for number in range(1, 9):
        key = new_key()
        first = send(shop, key, "/outer")
        assert (201, "500 pending") == (first.status_code, first.text)
        assert (number, 0) == (len(seen), checked_out(shop))
    assert_replayed(send(shop, key, "/outer"), first)
    assert sorted([1, 3] * 8) == amounts(shop)
    assert [("completed", "/outer")] * 8 == [(row["status"], row["request_path"]) for row in shop.rows()]


def test_a_request_within_a_view_that_fails(make_postgres: Make) -> None:
    """Where the atomic view fails after such a request, nothing of either is left, nor a binding of the session."""
    shop = make_postgres(engine_options={"pool_size": 1, "max_overflow": 0, "pool_timeout": 5})
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    guard(shop, lambda: commit(shop, 2), "/inner", atomic=True)

    def outer() -> Any:
        commit(shop, 1)
        send(shop, new_key(), "/inner", client=shop.app.test_client())
        commit(shop, 3)
        raise ZeroDivisionError

    guard(shop, outer, "/outer", atomic=True)
    with shop.app.app_context():
        assert 500 == send(shop, new_key(), "/outer").status_code
        assert "get_bind" not in vars(shop.db.session())
    assert ([], [], 0) == (amounts(shop), shop.rows(), checked_out(shop))


@pytest.mark.parametrize("how", ["pushed", "dispatched"])
def test_the_environ_is_handed_on(make_postgres: Make, how: str) -> None:
    """A request context on the atomic view's own environ, dispatched or not, neither hangs nor ends the view."""
    shop = make_postgres()
    shop.app.get("/target")(lambda: "target")

    def view() -> Any:
        commit(shop, 1)
        if how == "pushed":
            with shop.app.request_context(request.environ):
                inner = Response("target")
        else:
            request.environ |= {"PATH_INFO": "/target", "REQUEST_METHOD": "GET"}
            with shop.app.request_context(request.environ):
                inner = shop.app.full_dispatch_request()
        assert [] == amounts(shop)  # not concluded
        commit(shop, 2)
        return inner.get_data(as_text=True), 201

    guard(shop, view, atomic=True)
    key = new_key()
    first = background(send, shop, key).result(20)
    assert (201, "target", [1, 2]) == (first.status_code, first.text, amounts(shop))
    assert_replayed(send(shop, key), first)


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_in_a_context_of_its_own(make_postgres: Make, fails: bool) -> None:
    """In an app context of its own a request is an operation of its own, whatever becomes of the view that made it."""
    shop = make_postgres()
    guard(shop, lambda: commit(shop, 2) or "inner", "/inner", atomic=True)

    def outer() -> Any:
        commit(shop, 1)
        with shop.app.app_context():
            assert "inner" == send(shop, new_key(), "/inner", client=shop.app.test_client()).text
        commit(shop, 3)
        return "outer", 500 if fails else 201

    guard(shop, outer, "/outer", atomic=True)
    assert "outer" == send(shop, new_key(), "/outer").text
    assert ([2] if fails else [1, 2, 3]) == amounts(shop)
    paths = [row["request_path"] for row in shop.rows()]
    assert (["/inner"] if fails else ["/inner", "/outer"]) == sorted(paths)


# Sessions that are bound to something else


@pytest.mark.parametrize("bind", ["connection", "options"])
def test_a_session_bound_elsewhere(make_postgres: Make, bind: str) -> None:
    """A session on a connection, or on an engine with other options, can't be atomic: refused before the view runs."""
    shop = make_postgres()
    shop.app.testing = True
    guard(shop, lambda: (shop.runs.append("run"), commit(shop)), atomic=True)
    with shop.app.app_context():
        connection = shop.db.engine.connect()
        other = connection if bind == "connection" else shop.db.engine.execution_options(isolation_level="SERIALIZABLE")

        class Elsewhere(Session):
            def get_bind(self, *args: Any, **kwargs: Any) -> Any:
                return other

        shop.db.session = shop.db._make_scoped_session({"class_": Elsewhere})
    with connection, pytest.raises(ConfigurationError, match="not bound to the app's engine itself"):
        send(shop, new_key())
    assert ([], [], []) == (shop.runs, amounts(shop), shop.rows())


def test_a_binding_of_the_sessions_own(make_postgres: Make) -> None:
    """A ``get_bind`` that the app put on its session, and that gives the app's engine, is there again afterwards."""
    shop = make_postgres()
    guard(shop, lambda: commit(shop) or "x", atomic=True)
    with shop.app.app_context():
        session, engine = shop.db.session(), shop.db.engine

        def get_bind(*args: Any, **kwargs: Any) -> Any:
            return engine

        session.get_bind = get_bind
        assert (200, [1]) == (send(shop, new_key()).status_code, amounts(shop))
        assert get_bind is vars(session)["get_bind"]
