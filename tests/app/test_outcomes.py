"""What becomes of a claim: which answers are recorded, which are released, and who decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from flask import Blueprint, Response, abort, jsonify, make_response, request
from werkzeug.exceptions import HTTPException, NotFound
from werkzeug.test import TestResponse

from flask_idempotency.errors import OptionError
from tests.support.apps import Shop, events, new_key

UNAVAILABLE = "urn:problem-type:idempotency:record-unavailable"
ASK_AGAIN = [401, 403, 408, 409, 423, 425, 429]


def answer_with(shop: Shop, *views: Callable[[], Any], target: Any = None, **options: Any) -> None:
    """Guard a view at /answer that gives these in turn, the last one ever after; ``runs`` counts."""

    @(target or shop.app).post("/answer")
    @shop.idempotency.required(**options)
    def answer() -> Any:
        shop.runs.append("run")
        return views[min(len(shop.runs), len(views)) - 1]()


def post(shop: Shop, key: str, **headers: str) -> TestResponse:
    """Ask for the answer."""
    return shop.client.post("/answer", headers={"X-Tenant": "acme", "Idempotency-Key": key, **headers}, buffered=True)


def assert_recorded(shop: Shop, first: TestResponse, key: str) -> None:
    """A retry gets the same answer, and the view has run once."""
    retry = post(shop, key)
    assert (first.status, first.data, "true") == (retry.status, retry.data, retry.headers["Idempotent-Replay"])
    assert (["run"], ["completed"]) == (shop.runs, [row["status"] for row in shop.rows()])


def assert_unavailable(shop: Shop, key: str, status: int) -> None:
    """A retry gets to know that the request was carried out, and with which status; the view never runs again."""
    for seconds in (0, 3600):
        shop.shift(seconds)
        retry = post(shop, key)
        assert (409, UNAVAILABLE, status) == (retry.status_code, retry.json["type"], retry.json["original_status"])
    assert (["run"], ["completed"]) == (shop.runs, [row["status"] for row in shop.rows()])


class Broken(Exception):
    pass


def broken() -> Any:
    raise Broken


@pytest.mark.scenario(41)
@pytest.mark.parametrize("status", [200, 201, 299, 302, 304, 400, 402, 404, 405, 410, 413, 422, 451, 499])
def test_final_answers_are_recorded(light: Shop, status: int) -> None:
    """Every final answer below 500 is recorded."""
    answer_with(light, lambda: ("first", status), lambda: "second")
    key = new_key()
    assert_recorded(light, post(light, key), key)


@pytest.mark.scenario(41)
@pytest.mark.parametrize(
    ("how", "status"),
    [
        *(("return", status) for status in (*ASK_AGAIN, 500, 501, 503, 599)),
        *(("abort", status) for status in (401, 403, 408, 409, 423, 429, 500, 501, 503)),  # those that Werkzeug knows
    ],
)
def test_answers_that_ask_for_another_try_are_released(light: Shop, how: str, status: int) -> None:
    """The seven statuses that ask for another try, and a 5xx, give the key back: the retry runs at once."""

    def first() -> Any:
        return abort(status) if how == "abort" else ("again", status)

    answer_with(light, first, lambda: ("fine", 201))
    key = new_key()
    with events(light.app) as seen:
        assert (status, []) == (post(light, key).status_code, light.rows())
    assert [("released", status)] == [(name, fields["status"]) for name, fields in seen]
    retry = post(light, key)
    assert (201, "fine") == (retry.status_code, retry.text)
    assert "Idempotent-Replay" not in retry.headers
    assert 2 == len(light.runs)


@pytest.mark.scenario(41)
def test_released_and_then_recorded(shop: Shop) -> None:
    """A 503 once, then fine: the retry runs, and its answer is the record, on every database."""
    answer_with(shop, lambda: ("wait", 503), lambda: ("fine", 201))
    key = new_key()
    assert [503, 201, 201] == [post(shop, key).status_code for _ in range(3)]
    assert (2, ["completed"]) == (len(shop.runs), [row["status"] for row in shop.rows()])


def add_error_handlers(target: Any) -> None:
    """Error handlers of an app or a blueprint."""
    target.register_error_handler(404, lambda error: ({"mapped": "404"}, 404, {"X-Mapped": "yes"}))
    target.register_error_handler(Broken, lambda error: ({"mapped": "broken"}, 422))
    target.register_error_handler(ZeroDivisionError, lambda error: ({"mapped": "zero"}, 503))


@pytest.mark.scenario(43)
@pytest.mark.parametrize("where", ["app", "blueprint"])
@pytest.mark.parametrize("how", ["abort", "return", "raise"])
def test_mapped_errors_are_recorded_as_mapped(light: Shop, where: str, how: str) -> None:
    """What an error handler of app or blueprint makes of an error is the answer that is recorded."""
    target = light.app if where == "app" else Blueprint("shop", __name__)
    add_error_handlers(target)
    views = {"abort": lambda: abort(404), "return": lambda: ("not mapped", 404), "raise": broken}
    answer_with(light, views[how], target=target)
    if isinstance(target, Blueprint):
        light.app.register_blueprint(target)
    key = new_key()
    first = post(light, key)
    assert (422 if how == "raise" else 404) == first.status_code
    assert (how == "abort") == ("X-Mapped" in first.headers)
    assert_recorded(light, first, key)
    assert first.headers.get("X-Mapped") == post(light, key).headers.get("X-Mapped")


@pytest.mark.scenario(43)
@pytest.mark.parametrize("where", ["app", "blueprint"])
def test_an_error_mapped_to_5xx_is_released(light: Shop, where: str) -> None:
    """An exception that an error handler makes a 5xx of is released."""
    target = light.app if where == "app" else Blueprint("shop", __name__)
    add_error_handlers(target)
    answer_with(light, lambda: 1 // 0, lambda: "fine", target=target)
    if isinstance(target, Blueprint):
        light.app.register_blueprint(target)
    key = new_key()
    assert [(503, "zero"), (200, None)] == [
        (one.status_code, (one.json or {}).get("mapped") if one.is_json else None)
        for one in (post(light, key), post(light, key))
    ]


@pytest.mark.scenario(43)
def test_an_exception_with_its_own_response(light: Shop) -> None:
    """A raised HTTPException that carries a response is recorded as that response."""
    own = NotFound(response=make_own_response())

    def view() -> Any:
        raise own

    answer_with(light, view)
    key = new_key()
    first = post(light, key)
    assert (418, "own", "yes") == (first.status_code, first.text, first.headers["X-Own"])
    assert_recorded(light, first, key)


def make_own_response() -> Response:
    return Response("own", "418 Own Text", headers={"X-Own": "yes"})


@pytest.mark.scenario(43)
def test_a_status_that_werkzeug_does_not_know(light: Shop) -> None:
    """A subclass of HTTPException with a code of its own is recorded with it."""

    class PaymentRequired(HTTPException):
        code = 402
        description = "Pay first."

    def view() -> Any:
        raise PaymentRequired

    answer_with(light, view)
    key = new_key()
    first = post(light, key)
    assert 402 == first.status_code
    assert_recorded(light, first, key)


@pytest.mark.scenario(14, 43)
def test_an_unhandled_exception_is_released(shop: Shop) -> None:
    """An exception that nobody handles becomes the app's 500, and the retry runs at once."""
    answer_with(shop, broken, lambda: "fine")
    key = new_key()
    with events(shop.app) as seen:
        assert (500, []) == (post(shop, key).status_code, shop.rows())
    assert ["released"] == [name for name, _ in seen]
    assert ("fine", 2) == (post(shop, key).text, len(shop.runs))


@pytest.mark.scenario(49)
@pytest.mark.parametrize("setting", ["PROPAGATE_EXCEPTIONS", "TESTING", "DEBUG"])
def test_an_exception_that_escapes_is_released(light: Shop, setting: str) -> None:
    """An exception that Flask lets through, in testing, in debug or by configuration, is released as well."""
    light.app.config[setting] = True
    answer_with(light, broken, lambda: "fine")
    key = new_key()
    with events(light.app) as seen, pytest.raises(Broken):
        post(light, key)
    assert [("released", "Broken")] == [(name, fields["exception"]) for name, fields in seen]
    assert ([], "fine", 2) == (light.rows(), post(light, key).text, len(light.runs))


@pytest.mark.scenario(42)
@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("kind", [Broken, NotFound])
@pytest.mark.parametrize("config", [{}, {"record": lambda response: True}])
def test_a_hook_that_raises(
    make_light: Callable[..., Shop], position: str, kind: type[Exception], config: dict[str, Any]
) -> None:
    """An after_request function that raises makes a 500 of the answer, wherever it stands: released, and run again."""
    light = make_light(**config)
    fails = [True]

    def hook(response: Response) -> Response:
        if fails:
            fails.clear()
            raise kind
        return response

    if position == "before":
        light.app.after_request_funcs[None].insert(0, hook)
    else:
        light.app.after_request(hook)
    answer_with(light, lambda: ("fine", 201))
    key = new_key()
    assert (500, []) == (post(light, key).status_code, light.rows())
    assert [201, 201] == [post(light, key).status_code for _ in range(2)]
    assert 2 == len(light.runs)


@pytest.mark.scenario(42)
def test_a_hook_that_always_raises(light: Shop) -> None:
    """Where a hook keeps the extension from seeing any answer, the claim is given up and not left to its lease."""

    def hook(response: Response) -> Response:
        raise Broken

    light.app.after_request(hook)
    answer_with(light, lambda: ("fine", 201))
    key = new_key()
    with events(light.app) as seen:
        assert [500, 500] == [post(light, key).status_code for _ in range(2)]
    assert (2, [], ["Broken"] * 2) == (len(light.runs), light.rows(), [fields["exception"] for _, fields in seen])


@pytest.mark.scenario(42, 43)
def test_a_hook_whose_error_is_mapped(light: Shop) -> None:
    """What the app's handler for 500 makes of a failing hook is the final answer, and decides."""
    fails = [True]

    @light.app.errorhandler(500)
    def handle(error: Any) -> tuple[str, int]:
        return "mapped", 400

    @light.app.after_request
    def hook(response: Response) -> Response:
        if fails:
            fails.clear()
            raise Broken
        return response

    answer_with(light, lambda: ("fine", 201))
    key = new_key()
    first = post(light, key)
    assert (400, "mapped") == (first.status_code, first.text)
    assert_recorded(light, first, key)


class TestRecord:
    """``IDEMPOTENCY_RECORD``."""

    @pytest.mark.parametrize("status", [200, 201, 404, 409, 429, 500, 503])
    @pytest.mark.parametrize("where", ["config", "keyword"])
    def test_true_records(self, make_light: Callable[..., Shop], status: int, where: str) -> None:
        """What the callable says yes to is recorded, whatever its status; the nearer option wins."""
        options: dict[str, Any] = {"record": lambda response: response.status_code == status}
        shop = make_light(**(options if where == "config" else {"record": lambda response: False}))
        answer_with(shop, lambda: ("first", status), **({} if where == "config" else options))
        key = new_key()
        assert_recorded(shop, post(shop, key), key)

    @pytest.mark.parametrize("value", [False, None, 0, ""])
    def test_false_releases(self, make_light: Callable[..., Shop], value: object) -> None:
        """What the callable says no to is released, whatever its status."""
        shop = make_light(record=lambda response: value)
        answer_with(shop, lambda: ("first", 201), lambda: ("second", 201))
        key = new_key()
        assert ["first", "second"] == [post(shop, key).text for _ in range(2)]
        assert [] == shop.rows()

    def test_it_sees_the_final_answer(self, make_light: Callable[..., Shop]) -> None:
        """The callable gets the response as it goes out, and may be a coroutine."""

        async def record(response: Response) -> bool:
            return bool(response.get_json()["keep"])

        shop = make_light(record=record)
        shop.app.register_error_handler(Broken, lambda error: jsonify(keep=False))
        answer_with(shop, broken, lambda: jsonify(keep=True))
        key = new_key()
        assert [{"keep": False}, {"keep": True}, {"keep": True}] == [post(shop, key).json for _ in range(3)]
        assert 2 == len(shop.runs)

    @pytest.mark.scenario(76)
    @pytest.mark.parametrize("streamed", [False, True])
    def test_it_raises(self, make: Callable[..., Shop], caplog: pytest.LogCaptureFixture, streamed: bool) -> None:
        """A callable that raises after a charge: the client has its answer, the retry gets 409, and it is signalled."""

        def record(response: Response) -> bool:
            raise Broken("in the app's callable")

        shop = make(record=record)
        answer_with(shop, lambda: (iter(["char", "ged"]) if streamed else "charged", 201))
        key = new_key()
        with events(shop.app) as seen:
            first = post(shop, key)
        assert (201, "charged") == (first.status_code, first.text)
        assert ["Broken: in the app's callable"] == [
            fields["exception"] for name, fields in seen if name == "record_failed"
        ]
        assert [logging.ERROR] == [
            one.levelno for one in caplog.records if getattr(one, "event", "") == "idempotency.record_failed"
        ]
        assert_unavailable(shop, key, 201)

    @pytest.mark.scenario(66, 76)
    def test_it_crashes(self, make_light: Callable[..., Shop]) -> None:
        """A worker that is stopped inside of the callable is a crash: 409 until the lease is over."""

        def record(response: Response) -> bool:
            raise SystemExit

        shop = make_light(record=record)
        answer_with(shop, lambda: "charged")
        key = new_key()
        with pytest.raises(SystemExit):
            post(shop, key)
        assert 409 == post(shop, key).status_code
        assert (["run"], ["in_progress"]) == (shop.runs, [row["status"] for row in shop.rows()])

    def test_an_exception_is_not_its_business(self, make_light: Callable[..., Shop]) -> None:
        """A 5xx that an exception became is never recorded by the callable."""
        shop = make_light(record=lambda response: True)
        answer_with(shop, broken, lambda: "fine")
        key = new_key()
        assert [500, 200] == [post(shop, key).status_code for _ in range(2)]


@pytest.mark.parametrize("option", ["key", "scope", "fingerprint"])
@pytest.mark.parametrize("where", ["config", "keyword"])
def test_a_callable_that_raises_before_the_claim(make_light: Callable[..., Shop], option: str, where: str) -> None:
    """A callable for key, scope or fingerprint that raises is the app's own 500: nothing runs, nothing is stored."""

    def own() -> Any:
        raise Broken

    shop = make_light(**({option: own} if where == "config" else {}))
    answer_with(shop, lambda: "text", **({} if where == "config" else {option: own}))
    assert (500, [], []) == (post(shop, new_key()).status_code, shop.runs, shop.rows())


def test_a_scope_loader_that_raises(light: Shop) -> None:
    """A scope loader that raises is the app's own 500 too, and one that aborts answers as it says."""
    answer_with(light, lambda: "text")
    light.idempotency.scope_loader(broken)
    assert 500 == post(light, new_key()).status_code
    light.idempotency.scope_loader(lambda: abort(403))
    assert (403, [], []) == (post(light, new_key()).status_code, light.runs, light.rows())


@pytest.mark.parametrize("value", [object(), float("nan"), {1: 2}, {"a": {1}}])
def test_a_fingerprint_of_nothing_sensible(make_light: Callable[..., Shop], value: object) -> None:
    """A value that no fingerprint can be made of is the app's 500, before anything is stored."""
    shop = make_light(fingerprint=lambda: value)
    answer_with(shop, lambda: "text")
    assert (500, [], []) == (post(shop, new_key()).status_code, shop.runs, shop.rows())


class TestCurrent:
    """What the view steers with ``idempotency.current``."""

    @pytest.mark.parametrize("status", [200, 201, 400])
    def test_release(self, make: Callable[..., Shop], status: int) -> None:
        """A view that releases its claim records nothing, whatever its status and the app's rule."""
        shop = make(record=lambda response: True)

        def first() -> Any:
            assert shop.idempotency.current is not None
            shop.idempotency.current.release()
            return "first", status

        answer_with(shop, first, lambda: ("second", 201))
        key = new_key()
        with events(shop.app) as seen:
            assert (status, []) == (post(shop, key).status_code, shop.rows())
        assert [("released", status)] == [(name, fields["status"]) for name, fields in seen]
        assert ["second", "second"] == [post(shop, key).text for _ in range(2)]
        assert 2 == len(shop.runs)

    @pytest.mark.parametrize("value", [60, 60.0, timedelta(minutes=1)])
    def test_retention(self, make: Callable[..., Shop], value: Any) -> None:
        """A view sets how long this record alone is kept, from the recording on."""
        shop = make(retention=3600)

        def first() -> str:
            assert shop.idempotency.current is not None
            assert 3600 == shop.idempotency.current.retention
            shop.idempotency.current.retention = value
            return "first"

        answer_with(shop, first, lambda: "second")
        key, other = new_key(), new_key()
        assert ["first", "second"] == [post(shop, one).text for one in (key, other)]
        shop.shift(55)
        assert ["first", "second"] == [post(shop, one).text for one in (key, other)]
        shop.shift(10)
        assert 2 == len(shop.runs)
        post(shop, other)
        assert 2 == len(shop.runs)
        post(shop, key)
        assert 3 == len(shop.runs)

    @pytest.mark.parametrize("value", [0, -1, None, "soon", True, float("inf")])
    def test_a_retention_that_is_none(self, light: Shop, value: Any) -> None:
        """A retention that is no duration is refused where it is set, and the one before stays."""

        def view() -> str:
            current = light.idempotency.current
            assert current is not None
            with pytest.raises(OptionError):
                current.retention = value
            return str(current.retention)

        answer_with(light, view)
        assert "86400.0" == post(light, new_key()).text

    @pytest.mark.scenario(46)
    def test_hooks_can_tell_a_replay(self, light: Shop) -> None:
        """Hooks and error handlers see the attempt: its key, scope, and whether the view ran."""
        seen: list[Any] = []

        @light.app.after_request
        def look(response: Response) -> Response:
            current = light.idempotency.current
            seen.append(current and (current.key, current.scope, current.replay, current.takeover, current.attempts))
            return response

        answer_with(light, lambda: ("fine", 201))
        key = new_key()
        assert [201, 201] == [post(light, key).status_code for _ in range(2)]
        light.client.get("/nowhere")
        assert [(key, "acme", False, False, 0), (key, "acme", True, False, 0), None] == seen
        assert light.idempotency.current is None


@pytest.mark.scenario(50)
def test_what_never_reached_the_view_claims_nothing(light: Shop) -> None:
    """A hook's 429, a 404 and a 405 are unchanged, and nothing is stored."""

    @light.app.before_request
    def limit() -> Any:
        return ("slow down", 429, {"Retry-After": "7"}) if "X-Limit" in request.headers else None

    answer_with(light, lambda: "fine")
    key = new_key()
    limited = post(light, key, **{"X-Limit": "1"})
    assert (429, "7", "slow down") == (limited.status_code, limited.headers["Retry-After"], limited.text)
    headers = {"X-Tenant": "acme", "Idempotency-Key": key}
    assert 404 == light.client.post("/nowhere", headers=headers).status_code
    assert 405 == light.client.put("/answer", headers=headers).status_code
    assert ([], []) == (light.runs, light.rows())


@pytest.mark.scenario(46)
def test_a_replay_passes_error_handlers(light: Shop) -> None:
    """Handlers for all exceptions, or all HTTP ones, do not get hold of a replay, trapped or not."""
    light.app.register_error_handler(Exception, lambda error: ("handled", 500))
    light.app.register_error_handler(HTTPException, lambda error: ("handled", 500))
    answer_with(light, lambda: make_response("fine", 201))
    for trapping in (False, True):
        light.app.config["TRAP_HTTP_EXCEPTIONS"] = trapping
        key = new_key()
        assert [(201, "fine")] * 2 == [(one.status_code, one.text) for one in (post(light, key), post(light, key))]
