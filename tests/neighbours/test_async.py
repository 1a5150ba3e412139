"""Coroutines as views, hooks and callables, and apps under ASGI by asgiref's ``WsgiToAsgi``."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from asgiref.wsgi import WsgiToAsgi
from flask import Blueprint, Flask, Response, g, request, send_file, stream_with_context
from flask.views import MethodView

from tests.neighbours.five import Answer, Work, answer_of, by_tenant, case_of, first_run, the_five
from tests.support.apps import Shop, new_key, send, until

Beside = Callable[..., tuple[Shop, Work]]
SetUp = Callable[[Shop, Work], None]

ACME = {"X-Tenant": "acme"}


# Coroutines


def a_function(shop: Shop, work: Work, **options: Any) -> None:
    @shop.app.post("/charges")
    @shop.idempotency.required(**options)
    async def create_charge() -> Any:
        await asyncio.sleep(0)
        return work.asked()


def a_method(shop: Shop, work: Work, **options: Any) -> None:
    class Charges(MethodView):
        @shop.idempotency.required(**options)
        async def post(self) -> Any:
            await asyncio.sleep(0)
            return work.asked()

    shop.app.add_url_rule("/charges", view_func=Charges.as_view("charges"))


def a_decorated_class(shop: Shop, work: Work, **options: Any) -> None:
    class Charges(MethodView):
        decorators = [shop.idempotency.required(**options)]  # noqa: RUF012

        async def post(self) -> Any:
            await asyncio.sleep(0)
            return work.asked()

    shop.app.add_url_rule("/charges", view_func=Charges.as_view("charges"))


def a_protected_blueprint(shop: Shop, work: Work, **options: Any) -> None:
    blueprint = Blueprint("api", __name__)

    @blueprint.post("/charges")
    async def create_charge() -> Any:
        await asyncio.sleep(0)
        return work.asked()

    shop.idempotency.protect(blueprint, **options)
    shop.app.register_blueprint(blueprint)


KINDS = {"function": a_function, "method": a_method, "class": a_decorated_class, "blueprint": a_protected_blueprint}


@pytest.mark.scenario(51)
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_five(beside: Beside, kind: str, atomic: bool) -> None:
    """The five hold of coroutines, in both modes."""
    shop, work = beside()
    by_tenant(shop)
    KINDS[kind](shop, work, atomic=atomic)
    the_five(case_of(shop, work, atomic=atomic))


def add_hooks(app: Flask) -> None:
    """Hooks and a handler that are coroutines."""

    @app.before_request
    async def before() -> None:
        g.asked = "yes"

    @app.after_request
    async def after(response: Response) -> Response:
        response.headers["X-Asked"] = g.asked
        return response

    @app.teardown_request
    async def teardown(error: BaseException | None) -> None:
        assert g.asked

    @app.errorhandler(500)
    async def failed(error: Exception) -> tuple[str, int]:
        return "failed", 500


@pytest.mark.scenario(51)
def test_the_five_with_coroutines_all_around(beside: Beside, order: str) -> None:
    """They hold with hooks, an error handler and all callables that an app hands in as coroutines."""
    shop, work = beside(**{order: [add_hooks]})

    async def scope() -> str | None:
        await asyncio.sleep(0)
        return request.headers.get("X-Tenant")

    async def key() -> str | None:
        return request.headers.get("Idempotency-Key")

    async def fingerprint(asked: Any) -> Any:
        return asked.get_json()["amount"]

    async def record(response: Response) -> bool:
        return response.status_code == 201

    shop.idempotency.scope_loader(scope)
    # What is recorded is the app's rule for all answers of the view, and an exception is none of them.
    a_function(shop, work, key=key, fingerprint=fingerprint, record=record)
    the_five(case_of(shop, work))
    assert ["yes"] == first_run(case_of(shop, work)).header("X-Asked")


def test_a_cancelled_view_is_a_crash(beside: Beside) -> None:
    """A coroutine that is cancelled leaves its claim to the lease; one that runs into its own time-out releases it."""
    shop, work = beside(IDEMPOTENCY_ON_ERROR="release")
    by_tenant(shop)

    @shop.app.post("/x")
    @shop.idempotency.required
    async def view() -> str:
        work.runs += 1
        if work.runs == 1:
            await asyncio.wait_for(asyncio.sleep(30), 0.01)
        if work.runs == 2:
            raise asyncio.CancelledError
        return "x"

    key = new_key()
    assert 500 == send(shop, key).status_code
    with pytest.raises(asyncio.CancelledError):
        send(shop, key)
    assert [409, "in_progress"] == [send(shop, key).status_code, shop.rows()[0]["status"]]
    shop.shift(60)
    assert [(200, None), (200, "true")] == [
        (one.status_code, one.headers.get("Idempotent-Replay")) for one in (send(shop, key), send(shop, key))
    ]
    assert 3 == work.runs


# ASGI


def asked(asgi: Any, key: str, amount: int, headers: dict[str, str] | None = None, path: str = "/charges") -> Answer:
    """The answer of an ASGI application, over its own protocol."""
    return asyncio.run(_asked(asgi, key, amount, headers or {}, path))


async def _asked(asgi: Any, key: str, amount: int, headers: dict[str, str], path: str = "/charges") -> Answer:
    body = b'{"amount": %d}' % amount
    sent = {"Idempotency-Key": key, "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    asking = ApplicationCommunicator(asgi, scope_of(path, sent))
    await asking.send_input({"type": "http.request", "body": body[:5], "more_body": True})
    await asking.send_input({"type": "http.request", "body": body[5:]})
    start = await asking.receive_output(20)
    parts = []
    while True:
        part = await asking.receive_output(20)
        parts.append(part.get("body", b""))
        if not part.get("more_body"):
            break
    await asking.wait()
    found = [(name.decode(), value.decode()) for name, value in start["headers"]]
    return Answer(start["status"], found, b"".join(parts))


def scope_of(path: str, headers: dict[str, str]) -> dict[str, Any]:
    """A request as an ASGI server describes it."""
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }


def caller(asgi: Any, headers: dict[str, str] | None = None) -> Callable[[str, int], Answer]:
    """A caller of an ASGI application."""
    return lambda key, amount: asked(asgi, key, amount, headers)


@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_the_five_under_asgi(beside: Beside, kind: str, atomic: bool) -> None:
    """They hold under ASGI, of functions and of coroutines."""
    shop, work = beside()
    by_tenant(shop)
    if kind == "plain":
        shop.app.post("/charges")(shop.idempotency.required(atomic=atomic)(work.asked))
    else:
        KINDS[kind](shop, work, atomic=atomic)
    asgi = WsgiToAsgi(shop.app)
    callers = {"good": caller(asgi, ACME), "other": caller(asgi, {"X-Tenant": "emca"}), "refused": [caller(asgi)]}
    the_five(case_of(shop, work, atomic=atomic, **callers))


def test_many_at_once_under_asgi(beside: Beside) -> None:
    """Of many identical requests in one loop one runs; the others get 409 or the replay."""
    shop, work = beside()
    by_tenant(shop)
    a_function(shop, work)
    asgi = WsgiToAsgi(shop.app)
    key = new_key()

    async def many() -> list[Answer]:
        return await asyncio.gather(*(_asked(asgi, key, 1, ACME) for _ in range(8)))

    answers = asyncio.run(many())
    assert 1 == work.runs
    assert {(201, True), (409, False)} >= {
        (one.status, one.replayed) for one in answers if one.replayed or one.status != 201
    }
    assert 1 == sum(one.status == 201 and not one.replayed for one in answers)
    assert asked(asgi, key, 1, ACME).replayed


def of_parts() -> Response:
    return Response(stream_with_context(part for part in (b"a", b"b")), status=201)


def of_parts_with_a_length() -> Response:
    return Response((part for part in (b"a", b"b")), status=201, headers={"Content-Length": "2"})


def file_in_memory() -> Response:
    return send_file(io.BytesIO(b"ab"), mimetype="text/plain")


@pytest.mark.scenario(38)
@pytest.mark.parametrize("make", [of_parts, of_parts_with_a_length, file_in_memory])
def test_a_stream_under_asgi(beside: Beside, make: Callable[[], Response]) -> None:
    """A stream is recorded whole, though ``WsgiToAsgi`` neither asks on when it has all nor closes what it has read."""
    shop, work = beside()
    by_tenant(shop)

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> Response:
        work.runs += 1
        return make()

    asgi = WsgiToAsgi(shop.app)
    key = new_key()
    first, again = (asked(asgi, key, 1, ACME, "/x") for _ in range(2))
    assert (first.status, first.body, True) == (again.status, again.body, again.replayed)
    assert (1, "completed") == (work.runs, shop.rows()[0]["status"])


@pytest.mark.scenario(40)
def test_a_client_that_leaves_under_asgi(beside: Beside) -> None:
    """A stream that the server breaks off, since its client has left, is given up: its key never runs again."""
    shop, work = beside(IDEMPOTENCY_LOCK_TIMEOUT=2)
    by_tenant(shop)

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> Response:
        work.runs += 1
        # Without a context of Flask's: nobody closes it, and the collector would end that in another place.
        return Response((part for part in (b"a", b"b")), status=201)

    class Left(OSError):
        """What an ASGI server raises of a connection that is closed (ASGI's HTTP specification, 2.4)."""

    async def leave(asgi: WsgiToAsgi, scope: dict[str, Any]) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                raise Left

        await asgi(scope, receive, send)

    asgi = WsgiToAsgi(shop.app)
    key = new_key()
    with pytest.raises(Left):
        asyncio.run(leave(asgi, scope_of("/x", {"Idempotency-Key": key, **ACME, "Content-Length": "2"})))
    gc.collect()  # nobody closes the answer: it ends with the objects that held it
    until(lambda: shop.rows()[0]["status"] == "completed")
    assert (409, "record-unavailable") == ((retry := answer_of(send(shop, key, data="{}"))).status, retry.problem)
    assert 1 == work.runs
