"""Hooks, decorators and error handlers around a guarded view, and ``idempotency.current`` in all of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask, Response, abort, g, jsonify, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.attempt import Attempt
from flask_idempotency.errors import OptionError
from flask_idempotency.signals import executed
from tests.support.apps import Shop, close, events, new_key


def send(shop: Shop, key: str, path: str = "/x", **options: Any) -> TestResponse:
    """A request of the tenant ``acme``."""
    headers = {"Idempotency-Key": key, "X-Tenant": "acme", **options.pop("headers", {})}
    return shop.client.post(path, json={"amount": 1}, headers=headers, **options)


def flaky(shop: Shop, error: BaseException, *, decorator: Any = None) -> list[str]:
    """A guarded view ``/x`` that raises the first time, with a decorator above the guard; returns its runs."""
    runs: list[str] = []

    def view() -> tuple[str, int]:
        runs.append("x")
        if len(runs) == 1:
            raise error
        return f"run {len(runs)}", 201

    guarded = shop.idempotency.required(view)
    shop.app.post("/x")(decorator(guarded) if decorator else guarded)
    return runs


# Exceptions


@pytest.mark.parametrize("config", [{}, {"TESTING": True}, {"DEBUG": True}, {"PROPAGATE_EXCEPTIONS": True}])
@pytest.mark.scenario(49)
def test_a_view_that_raises(light: Shop, config: dict[str, bool]) -> None:
    """An exception that escapes the view releases the claim, also where it goes on to the server; the retry runs."""
    light.app.config.update(config)
    runs, key = flaky(light, ZeroDivisionError("x")), new_key()
    with events(light.app) as seen:
        if config:
            with pytest.raises(ZeroDivisionError):
                send(light, key)
        else:
            assert 500 == send(light, key).status_code
    assert [] == light.rows()
    ((name, fields),) = seen
    assert "released" == name
    assert ({"exception": "ZeroDivisionError"} if config else {"status": 500}).items() <= fields.items()
    assert [(201, "run 2"), (201, "run 2")] == [(one.status_code, one.text) for one in (send(light, key),) * 2]
    assert "true" == send(light, key).headers["Idempotent-Replay"]
    assert 2 == len(runs)


@pytest.mark.parametrize("config", [{}, {"TESTING": True}, {"DEBUG": True}])
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_view_that_dies(light: Shop, error: BaseException, config: dict[str, bool]) -> None:
    """An exception that is no Exception is a crash: nothing is recorded or released, and the lease decides."""
    light.app.config.update(config)
    runs, key = flaky(light, error), new_key()
    with events(light.app) as seen, pytest.raises(type(error)):
        send(light, key)
    assert [] == seen
    assert ["in_progress"] == [row["status"] for row in light.rows()]
    assert 409 == send(light, key).status_code
    light.shift(31)
    assert (201, "run 2") == ((answer := send(light, key)).status_code, answer.text)
    assert 2 == len(runs)


def swallowing(view: Callable[..., Any]) -> Callable[..., Any]:
    """As a REST toolkit that makes an answer of every exception."""

    @functools.wraps(view)
    def swallowed(*args: Any, **kwargs: Any) -> Any:
        try:
            return view(*args, **kwargs)
        except Exception as error:
            return jsonify(error=type(error).__name__), getattr(error, "code", None) or 500

    return swallowed


@pytest.mark.scenario(56)
def test_a_decorator_that_swallows_exceptions(light: Shop) -> None:
    """A toolkit that turns the exception into a 5xx leaves it a 5xx, and the claim is released."""
    runs, key = flaky(light, ZeroDivisionError(), decorator=swallowing), new_key()
    first = send(light, key)
    assert (500, {"error": "ZeroDivisionError"}) == (first.status_code, first.json)
    assert [] == light.rows()
    second, third = send(light, key), send(light, key)
    assert ((201, "run 2"), "true") == ((third.status_code, third.text), third.headers["Idempotent-Replay"])
    assert second.data == third.data
    assert 2 == len(runs)


@pytest.mark.parametrize("swallowed", [True, False])
@pytest.mark.scenario(56)
def test_an_exception_is_no_answer_to_record(make_light: Callable[..., Shop], swallowed: bool) -> None:
    """The app's rule for what is recorded is asked about the view's answers, not about what became of an exception."""
    shop = make_light(record=lambda response: True)
    runs, key = flaky(shop, ZeroDivisionError(), decorator=swallowing if swallowed else None), new_key()
    assert [500, 201, 201] == [send(shop, key).status_code for _ in range(3)]
    assert 2 == len(runs)


def test_a_view_that_answers_with_an_error(make_light: Callable[..., Shop]) -> None:
    """A 5xx that the view itself returns is its answer, and is recorded if the app's rule says so."""
    shop, runs = make_light(record=lambda response: True), []
    shop.app.post("/x")(shop.idempotency.required(lambda: runs.append("x") or (f"run {len(runs)}", 503)))
    key = new_key()
    assert [(503, "run 1")] * 2 == [(one.status_code, one.text) for one in (send(shop, key), send(shop, key))]


def test_a_decorator_that_swallows_a_replay(light: Shop) -> None:
    """What a toolkit makes of the exception by which a replay leaves does not reach the client."""
    light.app.post("/x")(swallowing(light.idempotency.required(lambda: ("made", 201, {"X-Kept": "yes"}))))
    key = new_key()
    first, retry = send(light, key), send(light, key)
    assert (201, b"made", "yes") == (retry.status_code, retry.data, retry.headers["X-Kept"])
    assert (first.content_type, "true") == (retry.content_type, retry.headers["Idempotent-Replay"])


def retrying(times: int, runs: list[Any]) -> Callable[..., Any]:
    """A decorator that calls its view again when it raised."""

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def retried(*args: Any, **kwargs: Any) -> Any:
            for number in range(times):
                runs.append("try")
                try:
                    return view(*args, **kwargs)
                except Exception:
                    if number == times - 1:
                        raise

        return retried

    return decorate


def test_a_decorator_that_calls_the_view_again(light: Shop) -> None:
    """A decorator above may call a view that raised again: that is one attempt, whose last answer is recorded."""
    tries: list[Any] = []
    runs, key = flaky(light, ZeroDivisionError(), decorator=retrying(3, tries)), new_key()
    first, retry = send(light, key), send(light, key)
    assert [(201, "run 2"), (201, "run 2")] == [(one.status_code, one.text) for one in (first, retry)]
    assert "true" == retry.headers["Idempotent-Replay"]
    assert ["x", "x"] == runs
    assert [1] == [row["attempts"] for row in light.rows()]


@pytest.mark.parametrize("size", [10, 600_000])
@pytest.mark.parametrize("form", [False, True])
def test_a_decorator_that_calls_a_refused_view_again(light: Shop, size: int, form: bool) -> None:
    """Called again after a refusal the guard reads the request from its start, however large, and refuses again."""
    tries: list[Any] = []

    @light.app.post("/x")
    @retrying(3, tries)
    @light.idempotency.required
    def view() -> str:
        return str(len(request.get_data()))

    def post(body: str) -> TestResponse:
        data = {"a": body} if form else body.encode()
        return light.client.post("/x", data=data, headers={"Idempotency-Key": key, "X-Tenant": "acme"})

    key = new_key()
    assert 200 == post("a" * size).status_code
    tries.clear()
    other = post("b" * size)
    assert (422, 3) == (other.status_code, len(tries))
    same = post("a" * size)
    assert (200, "true") == (same.status_code, same.headers["Idempotent-Replay"])


def test_a_decorator_that_calls_a_view_again_that_ran_without_the_store(make_light: Callable[..., Shop]) -> None:
    """Without the store, too, a view that has read the request and raised can be called again, and reads it again."""
    shop, tries, seen = make_light(on_store_error="execute"), [], []
    shop.execute(sa.text("DROP TABLE idempotency_keys"))

    @shop.app.post("/x")
    @retrying(2, tries)
    @shop.idempotency.required
    def view() -> str:
        seen.append(request.stream.read())
        if len(seen) == 1:
            raise ZeroDivisionError
        return "x"

    answer = shop.client.post("/x", data=b"body", headers={"Idempotency-Key": new_key(), "X-Tenant": "acme"})
    assert (200, [b"body", b"body"]) == (answer.status_code, seen)


@pytest.mark.parametrize("status", [400, 402, 404, 410, 422])
def test_what_a_view_raises_as_its_answer(light: Shop, status: int) -> None:
    """An answer that the view raises, through a handler of the app or not, is recorded like one that it returns."""
    runs: list[str] = []

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> str:
        runs.append("x")
        if status == 402:
            return abort(Response(f"run {len(runs)}", 402))
        abort(status, f"run {len(runs)}")

    if status == 410:
        light.app.register_error_handler(410, lambda error: (f"gone for good: {error.description}", 418))
    key = new_key()
    first, retry = send(light, key), send(light, key)
    assert (418 if status == 410 else status) == first.status_code == retry.status_code
    assert (first.data, first.content_type, "true") == (
        (retry.data, retry.content_type, retry.headers["Idempotent-Replay"])
    )
    assert ["x"] == runs


# Answers that never came from the view


@pytest.mark.scenario(50)
def test_a_hook_that_answers(light: Shop) -> None:
    """What a hook answers, a rate limiter for example, is unchanged; nothing is stored, no record touched."""
    limited: list[bool] = []
    light.app.before_request(lambda: ("slow down", 429) if limited else None)
    key = new_key()
    light.charge(key)
    before = light.rows()
    limited.append(True)
    for sent in (key, new_key()):
        answer = light.charge(sent)
        assert (429, "slow down") == (answer.status_code, answer.text)
        assert "Idempotent-Replay" not in answer.headers
    assert before == light.rows()
    limited.clear()
    assert "true" == light.charge(key).headers["Idempotent-Replay"]


@pytest.mark.scenario(50)
def test_a_hook_registered_before_the_extension_that_answers(sqlite_url: str) -> None:
    """A hook registered before the extension answers before anything of it is asked for."""
    app, idempotency = Flask("shop"), Idempotency()
    app.before_request(lambda: ("slow down", 429))
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
    idempotency.init_app(app, SQLAlchemy(app))
    app.post("/x")(idempotency.required(lambda: "x"))
    with events(app) as seen:
        answer = app.test_client().post("/x", headers={"Idempotency-Key": "short"})
    assert (429, "slow down", []) == (answer.status_code, answer.text, seen)
    close(app)


@pytest.mark.parametrize(("path", "method", "status"), [("/none", "POST", 404), ("/charges", "PATCH", 405)])
@pytest.mark.scenario(50)
def test_no_route(light: Shop, path: str, method: str, status: int) -> None:
    """A path or method without a route gets Flask's answer, with a valid key, an invalid one and none."""
    answers = [light.client.open(path, method=method, headers={"Idempotency-Key": key}) for key in ("k" * 20, "", "é")]
    assert {status} == {one.status_code for one in answers}
    assert [] == light.rows()


def test_a_body_that_is_too_large(light: Shop) -> None:
    """A request over the app's limit gets its 413 as without the extension, and touches no claim."""
    light.app.config["MAX_CONTENT_LENGTH"] = 1_000
    answer = light.client.post("/charges", data=b"x" * 2_000, headers={"Idempotency-Key": new_key(), "X-Tenant": "a"})
    assert (413, [], []) == (answer.status_code, light.rows(), light.runs)


# after_request


def test_hooks_before_and_after_the_extension(sqlite_url: str) -> None:
    """after_request functions registered before the extension run afresh on a replay; the later ones are recorded."""
    app, idempotency, calls = Flask("shop"), Idempotency(), {"outer": 0, "inner": 0}
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url

    def counting(name: str) -> Callable[[Response], Response]:
        def count(response: Response) -> Response:
            calls[name] += 1
            response.headers[f"X-{name}"] = str(calls[name])
            return response

        return count

    app.after_request(counting("outer"))
    db = SQLAlchemy(app)
    idempotency.init_app(app, db)
    app.after_request(counting("inner"))
    idempotency.scope_loader(lambda: "acme")
    app.post("/x")(idempotency.required(lambda: "x"))
    with app.app_context():
        db.create_all()
    answers = [app.test_client().post("/x", headers={"Idempotency-Key": "k" * 20}) for _ in range(3)]
    assert ["1", "2", "3"] == [one.headers["X-Outer"] for one in answers]
    assert ["1", "1", "1"] == [one.headers["X-Inner"] for one in answers]
    close(app)


@pytest.mark.scenario(46)
def test_a_hook_that_needs_what_the_view_left(light: Shop) -> None:
    """A hook that expects the view's ``g.order`` can tell a replay by ``current.replay``."""

    @light.app.after_request
    def announce(response: Response) -> Response:
        current = light.idempotency.current
        if current is not None and not current.replay:
            response.headers["X-Order"] = g.order
        return response

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> tuple[str, int]:
        g.order = "42"
        return "x", 201

    key = new_key()
    first, retry = send(light, key), send(light, key)
    assert (201, 201, "42") == (first.status_code, retry.status_code, first.headers["X-Order"])
    assert "true" == retry.headers["Idempotent-Replay"]


# current


def test_current_everywhere(light: Shop) -> None:
    """``current`` is one attempt in the view and in every hook after it, and ``None`` before and outside."""
    idempotency, seen = light.idempotency, {}

    def note(name: str) -> None:
        seen[name] = idempotency.current

    @light.app.before_request
    def before() -> None:
        note("before_request")

    @light.app.after_request
    def after(response: Response) -> Response:
        note("after_request")
        return response

    @light.app.teardown_request
    def teardown(error: BaseException | None) -> None:
        note("teardown_request")

    @light.app.teardown_appcontext
    def teardown_context(error: BaseException | None) -> None:
        note("teardown_appcontext")

    @light.app.errorhandler(410)
    def handle(error: Any) -> tuple[str, int]:
        note("errorhandler")
        return "gone", 410

    @light.app.post("/x")
    @idempotency.required
    def view() -> str:
        note("view")
        return abort(410)

    key = new_key()
    for replay in (False, True):
        seen.clear()
        send(light, key)
        attempts = [seen[name] for name in ("view", "errorhandler") if not replay]
        attempts += [seen["after_request"], seen["teardown_request"]]
        assert 1 == len(set(map(id, attempts)))
        assert isinstance(attempts[0], Attempt)
        assert (key, "acme", replay, False) == (
            (attempts[0].key, attempts[0].scope, attempts[0].replay, attempts[0].takeover)
        )
        assert light.rows()[0]["request_fingerprint"] == attempts[0].fingerprint
        assert seen["before_request"] is None
    assert "view" not in seen
    assert idempotency.current is None
    with light.app.app_context():
        assert idempotency.current is None
    with light.app.test_request_context("/x"):
        assert idempotency.current is None


@pytest.mark.parametrize("path", ["/get", "/optional", "/none"])
def test_current_of_requests_that_are_not_guarded(light: Shop, path: str) -> None:
    """In a request that is not guarded ``current`` is ``None``."""
    seen: list[Any] = []
    light.app.add_url_rule("/get", "get", lambda: seen.append(light.idempotency.current) or "x", methods=["POST"])
    light.app.post("/optional", endpoint="optional")(
        light.idempotency.optional(lambda: seen.append(light.idempotency.current) or "x")
    )
    light.app.after_request(lambda response: seen.append(light.idempotency.current) or response)
    light.client.post(path)
    assert {None} == set(seen)
    assert seen


def test_current_in_nested_requests(light: Shop) -> None:
    """A request made inside a view has its own attempt, in its hooks and signals, and the outer one keeps its."""
    outer, inner = new_key(), new_key()
    found: list[tuple[str, Any]] = []

    def keep(name: str) -> None:
        current = light.idempotency.current
        found.append((name, current and current.key))

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> str:
        keep("before")
        light.charge(inner)
        keep("after")
        return "x"

    def receive(sender: Any, key: str, **_: Any) -> None:
        keep(f"executed {key == inner}")

    with executed.connected_to(receive, sender=light.app):
        send(light, outer)
    assert [("before", outer), ("executed True", inner), ("after", outer), ("executed False", outer)] == found


def test_attempts_and_takeovers(light: Shop) -> None:
    """A view can tell that it took over from a holder that died, and how many attempts came before it."""
    seen: list[tuple[bool, int]] = []

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> str:
        current = light.idempotency.current
        assert current is not None
        seen.append((current.takeover, current.attempts))
        if len(seen) < 3:
            raise SystemExit
        return "x"

    key = new_key()
    for _ in range(2):
        with pytest.raises(SystemExit):
            send(light, key)
        light.shift(31)
    assert 200 == send(light, key).status_code
    assert [(False, 0), (True, 1), (True, 2)] == seen


@pytest.mark.parametrize("status", [201, 402, 500])
def test_a_view_that_releases(light: Shop, status: int) -> None:
    """After ``current.release()`` nothing is recorded, whatever the status, and the retry runs."""
    runs: list[str] = []

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> tuple[str, int]:
        runs.append("x")
        assert light.idempotency.current is not None
        light.idempotency.current.release()
        return f"run {len(runs)}", status

    key = new_key()
    assert ["run 1", "run 2"] == [send(light, key).text for _ in range(2)]
    assert [] == light.rows()


@pytest.mark.parametrize("value", [100, "100", timedelta(seconds=100)])
def test_the_retention_of_one_record(light: Shop, value: Any) -> None:
    """A view sets how long its own record is kept; the app's other records are kept as configured."""
    read: list[Any] = []

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> str:
        current = light.idempotency.current
        assert current is not None
        read.append(current.retention)
        current.retention = value
        read.append(current.retention)
        return f"run {len(read)}"

    key, other = new_key(), new_key()
    send(light, key)
    light.charge(other)
    light.shift(90)
    assert "true" == send(light, key).headers["Idempotent-Replay"]
    light.shift(20)
    assert "Idempotent-Replay" not in send(light, key).headers
    assert "true" == light.charge(other).headers["Idempotent-Replay"]
    assert [86_400, 100, 86_400, 100] == read


@pytest.mark.parametrize("value", [0, -1, None, "a day", float("nan"), True])
def test_a_retention_that_is_none(light: Shop, value: Any) -> None:
    """A wrong retention is an error in the view, where it stands, and changes nothing."""

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> str:
        current = light.idempotency.current
        assert current is not None
        with pytest.raises(OptionError, match=r"^idempotency\.current\.retention: "):
            current.retention = value
        return str(current.retention)

    assert "86400.0" == send(light, new_key()).text


def test_hooks_of_blueprints(light: Shop) -> None:
    """A blueprint's hooks run on a replay as on the first request, and what they changed of the answer is recorded."""
    calls: list[str] = []
    blueprint = Blueprint("api", __name__)
    blueprint.before_request(lambda: calls.append("before"))

    @blueprint.after_request
    def after(response: Response) -> Response:
        calls.append("after")
        response.headers["X-Call"] = str(len(calls))
        return response

    blueprint.post("/x", endpoint="x")(light.idempotency.required(lambda: "x"))
    light.app.register_blueprint(blueprint)
    key = new_key()
    assert ["2", "2"] == [send(light, key).headers["X-Call"] for _ in range(2)]
    assert ["before", "after"] * 2 == calls


def test_a_hook_that_changes_the_class(light: Shop) -> None:
    """What a response class encodes once is encoded once on a replay, too, where a hook makes it the answer's class."""

    class Louder(Response):
        def iter_encoded(self) -> Iterator[bytes]:
            return (one + b"!" for one in super().iter_encoded())

    light.app.post("/x")(light.idempotency.required(lambda: "x"))
    light.app.after_request(Louder.force_type)
    key = new_key()
    assert [b"x!", b"x!"] == [send(light, key).data for _ in range(2)]


def test_a_hook_that_raises_after_the_view(light: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """An after_request function that raises makes the answer a 500, and a view that committed nothing runs again."""
    broken = [True]
    light.app.post("/x")(light.idempotency.required(lambda: ("x", 201)))

    @light.app.after_request
    def after(response: Response) -> Response:
        if broken:
            raise ZeroDivisionError
        return response

    key = new_key()
    with caplog.at_level(logging.CRITICAL):
        assert 500 == send(light, key).status_code
    assert [] == light.rows()
    broken.clear()
    assert 201 == send(light, key).status_code
    assert "true" == send(light, key).headers["Idempotent-Replay"]
