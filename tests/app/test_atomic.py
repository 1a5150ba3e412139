"""Atomic mode: which work is kept with which answer, who sees it when, and what a failing commit leaves."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, abort, after_this_request, current_app, got_request_exception, send_file
from flask import stream_with_context as with_context
from werkzeug.exceptions import HTTPException

from flask_idempotency import signals
from flask_idempotency.errors import OptionError, StepError
from tests.support.apps import Shop, assert_replayed, events, guard, new_key, send
from tests.support.charges import add, amounts, charge

pytestmark = pytest.mark.one_driver

Work = Callable[[Shop], Any]


def statuses(shop: Shop) -> list[tuple[str, int]]:
    """The keys that are committed: what became of each, and with which answer."""
    return [(row["status"], row["response_status"]) for row in shop.rows()]


def nothing_left(shop: Shop) -> bool:
    """Whether neither work nor record is there."""
    return (0, []) == (shop.charges(), shop.rows())


@pytest.fixture(params=["plain", "testing"])
def either(request: pytest.FixtureRequest, make_atomic: Callable[..., Shop]) -> Shop:
    """A shop in atomic mode, as it is in production, and where exceptions come out."""
    shop = make_atomic()
    shop.app.testing = request.param == "testing"
    return shop


@pytest.fixture
def light(make_light: Callable[..., Shop]) -> Shop:
    """A shop in atomic mode on SQLite alone: for behaviour in which the database has no part."""
    return make_light(atomic=True)


# Work that is kept


def commits_twice(shop: Shop) -> None:
    """Two units of work."""
    charge(shop, 1)
    charge(shop, 2)


def goes_back(shop: Shop) -> None:
    """Back to the last commit, in the middle."""
    charge(shop, 1)
    add(shop, 2)
    shop.db.session.flush()
    shop.db.session.rollback()
    charge(shop, 3)


def nests(shop: Shop) -> None:
    """Savepoints of the app's own: one kept, one given up."""
    with shop.db.session.begin_nested():
        add(shop, 1)
    savepoint = shop.db.session.begin_nested()
    add(shop, 2)
    savepoint.rollback()
    shop.db.session.commit()
    with shop.db.session.begin_nested():
        add(shop, 3)


def begins(shop: Shop) -> None:
    """A block that begins and commits, as outside of Flask."""
    with shop.db.session.begin():
        add(shop, 1)


def fails_and_goes_on(shop: Shop) -> None:
    """A constraint that refuses, and the app that makes do."""
    charge(shop, 1)
    shop.db.session.add(shop.Charge(amount=None))
    with pytest.raises(sa.exc.IntegrityError):
        shop.db.session.commit()
    shop.db.session.rollback()
    charge(shop, 2)


def in_statements(shop: Shop) -> None:
    """Statements of its own, with and without the ORM's session."""
    shop.db.session.execute(sa.insert(shop.Charge), [{"amount": 1}, {"amount": 2}])
    shop.db.session.connection().execute(sa.insert(shop.Charge.__table__).values(amount=3))


@pytest.mark.parametrize(
    ("work", "kept"),
    [
        (charge, [100]),
        (lambda shop: add(shop) and shop.db.session.flush(), [100]),
        (add, [100]),
        (commits_twice, [1, 2]),
        (goes_back, [1, 3]),
        (nests, [1, 3]),
        (begins, [1]),
        (fails_and_goes_on, [1, 2]),
        (in_statements, [1, 2, 3]),
        (lambda shop: add(shop) and shop.db.session.rollback(), []),
        (lambda shop: None, []),
    ],
    ids=["commit", "flush", "add", "twice", "back", "nested", "begin", "constraint", "statements", "rollback", "none"],
)
def test_work_is_kept_with_its_answer(atomic: Shop, work: Work, kept: list[int]) -> None:
    """What the view committed, or left to be committed, is there with the record; what it rolled back is not."""
    guard(atomic, lambda: (work(atomic), ("done", 201))[1])
    key = new_key()
    first = send(atomic, key)
    assert (201, kept, [("completed", 201)]) == (first.status_code, amounts(atomic), statuses(atomic))
    assert_replayed(send(atomic, key), first)
    assert kept == amounts(atomic)


def raised(status: int) -> None:
    """An answer as an exception."""
    response = Response("no", status)
    if status == 402:
        raise HTTPException(response=response)
    abort(response)


@pytest.mark.parametrize("how", ["returned", "raised"])
@pytest.mark.parametrize("status", [204, 402, 404])
def test_answers_that_are_recorded(atomic: Shop, status: int, how: str) -> None:
    """A final answer is recorded with the work that was done for it, however it came to be."""
    guard(atomic, lambda: (charge(atomic), raised(status) if how == "raised" else None, ("no", status))[-1])
    key = new_key()
    first = send(atomic, key)
    assert (status, [100], [("completed", status)]) == (first.status_code, amounts(atomic), statuses(atomic))
    assert_replayed(send(atomic, key), first)


def test_answers_of_error_handlers_are_recorded(atomic: Shop) -> None:
    """The answer that an error handler makes of an exception decides; what was not committed yet is kept too."""

    @atomic.app.errorhandler(LookupError)
    def handle(error: LookupError) -> tuple[str, int]:
        return "no funds", 402

    def view() -> None:
        charge(atomic, 1)
        add(atomic, 2)
        raise LookupError

    guard(atomic, view)
    key = new_key()
    first = send(atomic, key)
    assert (402, [1, 2], [("completed", 402)]) == (first.status_code, amounts(atomic), statuses(atomic))
    assert_replayed(send(atomic, key), first)


# Work that is rolled back


@pytest.mark.parametrize("how", ["returned", "raised"])
@pytest.mark.parametrize("status", [401, 403, 408, 409, 423, 425, 429, 500, 503, 599])
def test_answers_that_are_released(light: Shop, status: int, how: str) -> None:
    """An answer that asks for another try, and a 5xx, leave nothing of the work; the retry runs at once."""
    guard(light, lambda: (charge(light), raised(status) if how == "raised" else None, ("no", status))[-1])
    key = new_key()
    for _ in range(2):
        answer = send(light, key)
        assert (status, "no", True) == (answer.status_code, answer.text, nothing_left(light))
        assert "Idempotent-Replay" not in answer.headers


@pytest.mark.scenario(13, 14, 41, 42, 49)
def test_what_fails_is_rolled_back(either: Shop) -> None:
    """A 429, a 5xx, an exception and a constraint leave nothing, and each retry runs at once; then one does it."""

    def refused() -> None:
        shop.db.session.add(shop.Charge(amount=None))
        shop.db.session.commit()

    shop, runs = either, iter([429, 503, ZeroDivisionError, refused, 201])

    def view() -> tuple[str, int]:
        charge(shop)
        how: Any = next(runs)
        if how is refused:
            refused()
        if how is ZeroDivisionError:
            raise ZeroDivisionError
        return "x", how

    guard(shop, view)
    key, answers = new_key(), []
    for _ in range(5):
        assert nothing_left(shop)
        try:
            answers.append(send(shop, key).status_code)
        except (ZeroDivisionError, sa.exc.IntegrityError):
            assert shop.app.testing
            answers.append(500)
    assert [429, 503, 500, 500, 201] == answers
    assert ([100], [("completed", 201)]) == (amounts(shop), statuses(shop))


@pytest.mark.scenario(42)
def test_a_failing_hook(either: Shop) -> None:
    """An ``after_request`` function that raises takes the work with it, on whichever side of the extension it is."""
    shop = either

    def hook(response: Response) -> Response:
        raise ZeroDivisionError

    shop.app.after_request(hook)
    guard(shop, lambda: (charge(shop), ("x", 201))[1])
    for _ in range(2):
        try:
            assert 500 == send(shop, new_key()).status_code
        except ZeroDivisionError:
            assert shop.app.testing
        assert nothing_left(shop)
        functions = shop.app.after_request_funcs[None]
        functions.insert(0, functions.pop())


@pytest.mark.parametrize(("inner", "outer"), [(201, 503), (402, 500), (503, 503)])
@pytest.mark.parametrize("on_error", ["auto", "record"])
def test_a_hook_that_makes_a_failure_of_an_answer(light: Shop, inner: int, outer: int, on_error: str) -> None:
    """A hook outside of the record that answers 5xx rolls the work back; no answer to lost work is recorded."""

    @light.app.after_request
    def hook(response: Response) -> Response:
        return Response("down", outer)

    functions = light.app.after_request_funcs[None]
    functions.insert(0, functions.pop())
    guard(light, lambda: (charge(light), ("x", inner))[1], on_error=on_error)
    key = new_key()
    kept = [("completed", 503)] if (inner, on_error) == (503, "record") else []
    for _ in range(2):
        answer = send(light, key)
        assert (outer, [], kept) == (answer.status_code, amounts(light), statuses(light))


def test_a_hook_that_envelopes_failures(light: Shop) -> None:
    """An API that says all its errors with a 200, by a hook outside of the record, keeps no work of a failure."""

    @light.app.after_request
    def hook(response: Response) -> Response:
        return Response(f"status: {response.status_code}")

    functions = light.app.after_request_funcs[None]
    functions.insert(0, functions.pop())
    guard(light, lambda: (charge(light), ("x", 503))[1])
    guard(light, lambda: (charge(light), ("x", 503))[1], "/recorded", on_error="record")
    assert "status: 500" == send(light, new_key()).text
    assert nothing_left(light)
    assert "status: 503" == send(light, new_key(), "/recorded").text
    assert ([], [("completed", 503)]) == (amounts(light), statuses(light))


@pytest.mark.parametrize("how", ["current.release", "record", "hook"])
def test_a_success_that_asks_to_be_released(either: Shop, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """An answer below 400 is always recorded: asking to release it is an error in the log, rolled back, and a 500."""
    shop = either

    def view() -> tuple[str, int]:
        charge(shop)
        if how == "current.release":
            shop.idempotency.current.release()  # type: ignore[union-attr]
        return "x", 201

    @shop.app.after_request
    def hook(response: Response) -> Response:
        if how == "hook" and response.status_code < 400:
            shop.idempotency.current.release()  # type: ignore[union-attr]
        return response

    # Functions that are registered later run earlier.
    guard(shop, view, **({"record": lambda response: False} if how == "record" else {}))
    key = new_key()
    for _ in range(2):
        answer = send(shop, key)
        assert (500, True) == (answer.status_code, nothing_left(shop))
        assert "Internal Server Error" in answer.text
    assert "answered below 400 and asked to release the key" in caplog.text


def test_a_failure_that_asks_to_be_released(light: Shop) -> None:
    """An answer from 400 on that the view wants released goes out as it is, its work rolled back."""
    guard(light, lambda: (charge(light), light.idempotency.current.release(), ("poor", 402))[-1])  # type: ignore[union-attr]
    key = new_key()
    for _ in range(2):
        assert ("poor", 402, True) == ((answer := send(light, key)).text, answer.status_code, nothing_left(light))


@pytest.mark.parametrize("before", ["expired", "stale"])
def test_a_failure_is_recorded_over_what_was_there(make_atomic: Callable[..., Shop], before: str) -> None:
    """With ``on_error="record"`` a 5xx takes the place of an expired record, and of a claim whose holder is gone."""
    shop, runs = make_atomic(on_error="record"), []

    def view() -> tuple[str, int]:
        runs.append(before)
        charge(shop)
        return "down", 503

    guard(shop, view)
    key = new_key()
    assert 503 == send(shop, key).status_code
    if before == "stale":
        shop.execute(sa.update(shop.table).values(status="in_progress", response_status=None, response_body=None))
    shop.shift(40 if before == "stale" else 90_000)
    answers = [send(shop, key) for _ in range(2)]
    assert [(503, None), (503, "true")] == [(one.status_code, one.headers.get("Idempotent-Replay")) for one in answers]
    assert (2, [], [("completed", 503)]) == (len(runs), amounts(shop), statuses(shop))


@pytest.mark.parametrize("how", ["returned", "raised", "handled"])
def test_failures_that_are_recorded(either: Shop, how: str) -> None:
    """With ``on_error="record"`` a 5xx is the answer from now on; the work is rolled back all the same."""
    shop, runs = either, []

    def view() -> tuple[str, int]:
        runs.append(how)
        charge(shop)
        if how == "raised":
            raise ZeroDivisionError
        if how == "handled":
            raise LookupError
        return "down", 503

    @shop.app.errorhandler(LookupError)
    def handle(error: LookupError) -> tuple[str, int]:
        return "down", 503

    guard(shop, view, on_error="record")
    key, status = new_key(), 500 if how == "raised" else 503
    if how == "raised" and shop.app.testing:
        with pytest.raises(ZeroDivisionError):
            send(shop, key)
    else:
        assert status == send(shop, key).status_code
    retry = send(shop, key)
    assert (status, "true") == (retry.status_code, retry.headers.get("Idempotent-Replay"))
    assert ([how], [], [("completed", status)]) == (runs, amounts(shop), statuses(shop))


@pytest.mark.parametrize("where", ["one decorator", "configuration", "app"])
def test_holding_is_refused(make_light: Callable[..., Shop], where: str) -> None:
    """``on_error="hold"`` contradicts atomic mode, whose outcomes are known: an error when the options are read."""
    if where == "one decorator":
        with pytest.raises(OptionError, match="on_error='hold'"):
            make_light().idempotency.required(atomic=True, on_error="hold")
    elif where == "configuration":
        with pytest.raises(OptionError, match="on_error='hold'"):
            make_light(atomic=True, on_error="hold")
    else:
        shop = make_light(on_error="hold")
        guard(shop, lambda: "x", atomic=True)
        for _ in range(2):
            assert 500 == shop.client.get("/").status_code
        shop.app.testing = True
        with pytest.raises(OptionError, match="on_error='hold'"):
            shop.client.get("/")


@pytest.mark.parametrize("how", ["step", "derive_key"])
def test_steps_are_refused(atomic: Shop, how: str) -> None:
    """Nothing of an attempt that fails is kept in atomic mode, so steps and derived keys are an error there."""
    atomic.app.testing, called = True, []

    def view() -> Any:
        charge(atomic)
        if how == "step":
            return atomic.idempotency.step("pay", lambda: called.append("x") or "x")
        return atomic.idempotency.derive_key("pay")

    guard(atomic, view)
    with pytest.raises(StepError, match="atomic"):
        send(atomic, new_key())
    assert ([], True) == (called, nothing_left(atomic))


# Who sees it when


class Watching:
    """A WSGI middleware that looks at the database when the answer's head, body and end pass."""

    def __init__(self, shop: Shop, application: Callable[..., Any]) -> None:
        self.shop = shop
        self.application = application
        self.seen: list[tuple[str, int, int]] = []

    def look(self, when: str) -> None:
        """Take down how many charges and keys are there for others."""
        self.seen.append((when, self.shop.charges(), len(self.shop.rows())))

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        """Serve the request."""

        def start(*arguments: Any) -> Any:
            self.look("head")
            return start_response(*arguments)

        answer = self.application(environ, start)
        self.look("body")
        return answer  # type: ignore[no-any-return]


@pytest.mark.scenario(13)
def test_nothing_is_visible_before_the_answer_is_made(make: Callable[..., Shop]) -> None:
    """Others see neither work nor record in the view, in hooks and at the end of the view's commit; then both."""
    shop = make(atomic=True)
    watching = Watching(shop, shop.app.wsgi_app)
    functions = shop.app.after_request_funcs[None]
    shop.app.after_request(lambda response: (watching.look("earlier hook"), response)[1])
    functions.insert(0, functions.pop())
    shop.app.after_request(lambda response: (watching.look("later hook"), response)[1])

    def view() -> tuple[str, int]:
        after_this_request(lambda response: (watching.look("this request"), response)[1])
        charge(shop)
        watching.look("view")
        return "x", 201

    guard(shop, view)
    shop.app.wsgi_app = watching  # type: ignore[method-assign]
    assert 201 == send(shop, new_key()).status_code
    hooks = ["view", "this request", "later hook", "earlier hook"]
    assert [*((when, 0, 0) for when in hooks), ("head", 1, 1), ("body", 1, 1)] == watching.seen


def test_hooks_work_in_the_transaction(atomic: Shop) -> None:
    """What an ``after_request`` function writes through ``db.session`` is part of the operation, commit or not."""

    @atomic.app.after_request
    def hook(response: Response) -> Response:
        if response.status_code < 500:
            charge(atomic, 1)
            add(atomic, 2)
        return response

    guard(atomic, lambda: (charge(atomic, 3), ("x", 201))[1])
    guard(atomic, lambda: (charge(atomic, 4), ("x", 429))[1], "/released")
    assert 429 == send(atomic, new_key(), "/released").status_code
    assert nothing_left(atomic)
    key = new_key()
    assert 201 == send(atomic, key).status_code
    assert [1, 2, 3] == amounts(atomic)


# Streams, files, and answers without a body


def test_a_stream_is_part_of_the_operation(atomic: Shop) -> None:
    """A generator that works through ``db.session`` is read before the commit, and its work committed with the rest."""

    def view() -> Response:
        def lines() -> Iterator[str]:
            charge(atomic, 1)
            yield "one "
            add(atomic, 2)
            yield f"of {atomic.db.session.query(atomic.Charge).count()}"

        return Response(with_context(lines()), 201)

    guard(atomic, view)
    key = new_key()
    first = send(atomic, key)
    assert (201, "one of 2", [1, 2]) == (first.status_code, first.text, amounts(atomic))
    assert_replayed(send(atomic, key), first)


def test_a_stream_that_fails(either: Shop) -> None:
    """A generator that raises, after its first chunk too, is a 500 with all rolled back, and is closed."""
    closed: list[str] = []

    def view() -> Response:
        charge(either)

        def lines() -> Iterator[str]:
            yield "one "
            raise ZeroDivisionError

        response = Response(with_context(lines()), 201)
        response.call_on_close(lambda: closed.append("x"))
        return response

    guard(either, view)
    key = new_key()
    for _ in range(2):
        try:
            assert 500 == send(either, key).status_code
        except ZeroDivisionError:
            assert either.app.testing
        assert nothing_left(either)


def test_a_stream_that_is_too_large(either: Shop) -> None:
    """A stream beyond ``max_body`` is a 500, rolled back, however much is to come; one of just that size is kept."""
    closed: list[str] = []

    def view(size: int) -> Response:
        def parts() -> Iterator[bytes]:
            try:
                for _ in range(size):
                    yield b"x" * 10
            finally:
                closed.append("x")

        charge(either)
        return Response(parts(), 201)

    guard(either, lambda: view(10**9), "/large", max_body=100)
    guard(either, lambda: view(10), "/fits", max_body=100)
    key = new_key()
    for runs in (1, 2):
        answer = send(either, key, "/large")
        assert (500, True, runs) == (answer.status_code, nothing_left(either), len(closed))
    key = new_key()
    first = send(either, key, "/fits")
    assert (201, 100) == (first.status_code, len(first.data))
    assert_replayed(send(either, key, "/fits"), first)
    assert [100] == amounts(either)


def test_a_ready_body_that_is_too_large(atomic: Shop) -> None:
    """A ready body beyond ``max_body`` goes out whole; the work is kept, and the key completed without an answer."""
    guard(atomic, lambda: (charge(atomic), ("x" * 101, 201))[1], max_body=100)
    key = new_key()
    assert (201, "x" * 101) == ((first := send(atomic, key)).status_code, first.text)
    retry = send(atomic, key)
    assert (409, True) == (retry.status_code, retry.json["type"].endswith("record-unavailable"))
    assert [100] == amounts(atomic)


def test_files(atomic: Shop) -> None:
    """A file is read before the commit, from memory or a path, and the replay is the same."""
    guard(atomic, lambda: (charge(atomic), send_file(io.BytesIO(b"memory"), "text/plain"))[1], "/memory")
    guard(atomic, lambda: (charge(atomic), send_file(__file__))[1], "/path")
    for number, path in enumerate(["/memory", "/path"], start=1):
        key = new_key()
        first = send(atomic, key, path)
        assert (200, number) == (first.status_code, atomic.charges())
        assert first.data
        assert_replayed(send(atomic, key, path), first)


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(light: Shop, status: int) -> None:
    """An answer whose status has no body is recorded, a generator in it or not."""
    guard(light, lambda: (charge(light), Response((b"x" for _ in range(3)), status))[1])
    key = new_key()
    first = send(light, key)
    assert (status, b"", 1) == (first.status_code, first.data, light.charges())
    assert_replayed(send(light, key), first)


# A commit that fails


@pytest.fixture
def deferred(atomic: Shop) -> Shop:
    """A shop whose ``/x`` adds a line to a charge that is not there, which shows only at the commit."""
    with atomic.app.app_context():
        engine = atomic.db.engine
        if engine.dialect.name == "sqlite":
            sa.event.listen(engine, "checkout", lambda driver, *_: driver.execute("PRAGMA foreign_keys = ON"))

        class Line(atomic.db.Model):  # type: ignore[name-defined]
            id = sa.Column(sa.Integer, primary_key=True)
            charge_id = sa.Column(sa.ForeignKey("charge.id", deferrable=True, initially="DEFERRED"))

        atomic.db.create_all()
    atomic.runs = [True]

    def view() -> tuple[str, int]:
        parent = add(atomic)
        atomic.db.session.flush()
        atomic.db.session.add(Line(charge_id=10**6 if atomic.runs[-1] else parent.id))
        atomic.db.session.commit()
        return "x", 201

    guard(atomic, view)
    return atomic


@pytest.mark.parametrize("testing", [False, True])
@pytest.mark.scenario(19)
def test_a_deferred_constraint(deferred: Shop, testing: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A constraint that fails at the commit turns the answer into a 500; nothing is recorded, and the retry runs."""
    deferred.app.testing = testing
    exceptions: list[Exception] = []

    def note(sender: Any, exception: Exception, **_: Any) -> None:
        exceptions.append(exception)

    key = new_key()
    with got_request_exception.connected_to(note, deferred.app), events(deferred.app) as seen:
        first = send(deferred, key)
    assert (500, True) == (first.status_code, nothing_left(deferred))
    assert "Internal Server Error" in first.text
    assert [True] == [isinstance(one, sa.exc.IntegrityError) for one in exceptions]
    assert "IntegrityError" in caplog.text
    assert [("released", "IntegrityError")] == [(name, fields.get("exception")) for name, fields in seen]
    deferred.runs.append(False)
    again = send(deferred, key)
    assert (201, [100]) == (again.status_code, amounts(deferred))
    assert_replayed(send(deferred, key), again)


@pytest.mark.scenario(19)
def test_the_apps_own_500(deferred: Shop) -> None:
    """The app's error handler and its hooks shape the answer that a failing commit makes, cookies and all."""

    @deferred.app.errorhandler(500)
    def handle(error: Any) -> tuple[dict[str, str], int]:
        return {"sorry": type(error.original_exception).__name__}, 500

    @deferred.app.after_request
    def brand(response: Response) -> Response:
        response.headers["X-Brand"] = str(response.status_code)
        return response

    answer = send(deferred, new_key())
    assert (500, {"sorry": "IntegrityError"}) == (answer.status_code, answer.json)
    assert (["500"], str(len(answer.data))) == (answer.headers.getlist("X-Brand"), answer.headers["Content-Length"])
    assert nothing_left(deferred)


def test_a_handler_for_the_commits_own_error(deferred: Shop) -> None:
    """A failing commit is a 5xx, also where the app has a handler that makes something else of such errors in views."""

    @deferred.app.errorhandler(sa.exc.IntegrityError)
    def handle(error: sa.exc.IntegrityError) -> tuple[str, int]:
        return "done already", 200

    key = new_key()
    for _ in range(2):
        answer = send(deferred, key)
        assert (500, True) == (answer.status_code, nothing_left(deferred))
        assert "Idempotent-Replay" not in answer.headers


# After the commit


def test_after_the_commit(make: Callable[..., Shop]) -> None:
    """Functions are called in order when work and record are there for others, and before the answer leaves."""
    shop, told = make(atomic=True), []
    watching = Watching(shop, shop.app.wsgi_app)

    def view() -> tuple[str, int]:
        shop.idempotency.after_commit(lambda: told.append(("first", shop.charges(), len(shop.rows()))))
        charge(shop)
        shop.idempotency.after_commit(lambda: told.append(("second", current_app.name, watching.seen[:])))
        return "x", 201

    guard(shop, view)
    shop.app.wsgi_app = watching  # type: ignore[method-assign]
    key = new_key()
    for _ in range(2):
        assert 201 == send(shop, key).status_code
    assert [("first", 1, 1), ("second", "shop", [])] == told


@pytest.mark.parametrize("how", [429, 503, "raise", "release", "constraint"])
def test_not_after_what_was_rolled_back(light: Shop, how: Any) -> None:
    """What was to be done after the commit is not done where there is none."""
    told: list[str] = []

    def view() -> tuple[str, int]:
        light.idempotency.after_commit(lambda: told.append("x"))
        if how == "raise":
            raise ZeroDivisionError
        if how == "release":
            light.idempotency.current.release()  # type: ignore[union-attr]
        if how == "constraint":
            light.db.session.add(light.Charge(amount=None))
        return "x", how if isinstance(how, int) else 201

    guard(light, view)
    assert send(light, new_key()).status_code >= 400
    assert ([], True) == (told, nothing_left(light))


def test_a_failure_after_the_commit(atomic: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A function that raises after the commit is logged; the answer stays, and the others are called."""
    told: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError("the queue is down")

    def view() -> tuple[str, int]:
        atomic.idempotency.after_commit(fail)
        atomic.idempotency.after_commit(lambda: told.append("x"))
        charge(atomic)
        return "x", 201

    guard(atomic, view)
    key = new_key()
    first = send(atomic, key)
    assert (201, ["x"]) == (first.status_code, told)
    assert "the queue is down" in caplog.text
    assert_replayed(send(atomic, key), first)


def test_after_the_commit_the_session_works(atomic: Shop) -> None:
    """A function that is called after the commit can use ``db.session``, whose own commit counts then."""

    def view() -> tuple[str, int]:
        charge(atomic, 1)
        atomic.idempotency.after_commit(lambda: charge(atomic, 2))
        return "x", 201

    guard(atomic, view)
    assert 201 == send(atomic, new_key()).status_code
    assert [1, 2] == amounts(atomic)


def test_after_the_commit_without_a_key(light: Shop) -> None:
    """Without a key the app commits by itself: what is to follow is called when the answer is below 400."""
    told: list[str] = []

    @light.app.post("/optional/<int:status>")
    @light.idempotency.optional(atomic=True)
    def view(status: int) -> tuple[str, int]:
        light.idempotency.after_commit(lambda: told.append(f"{status} of {light.charges()}"))
        charge(light)
        return "x", status

    for status in (201, 402, 500):
        assert status == light.client.post(f"/optional/{status}", headers={"X-Tenant": "acme"}).status_code
    assert ["201 of 1"] == told
    assert 3 == light.charges()


def test_after_the_commit_in_other_modes(make_light: Callable[..., Shop]) -> None:
    """Where there is no commit of the extension's, asking for it is an error that says so."""
    shop = make_light()
    shop.app.testing = True
    guard(shop, lambda: shop.idempotency.after_commit(lambda: None) or "x")
    with pytest.raises(RuntimeError, match="atomic"):
        send(shop, new_key())
    with shop.app.app_context(), pytest.raises(RuntimeError, match="atomic"):
        shop.idempotency.after_commit(lambda: None)


# Events


def test_events(atomic: Shop) -> None:
    """One event tells of each end: executed, replayed, mismatched, and released with what came in between."""
    guard(atomic, lambda: (charge(atomic), ("x", 201))[1])
    guard(atomic, lambda: ("x", 503), "/down")
    guard(atomic, lambda: 1 / 0, "/raises")
    key, other = new_key(), new_key()
    with events(atomic.app) as seen:
        send(atomic, key)
        send(atomic, key)
        send(atomic, key, json={"other": 1})
        send(atomic, other, "/down")
        send(atomic, other, "/raises")
    assert [
        ("executed", 201),
        ("replayed", None),
        ("mismatched", None),
        ("released", 503),
        ("released", 500),
    ] == [(name, fields.get("status")) for name, fields in seen]
    assert {key, other} == {fields["key"] for _, fields in seen}


def test_executed_is_told_after_the_commit(make: Callable[..., Shop]) -> None:
    """Whoever hears that a view was executed finds its work."""
    shop, found = make(atomic=True), []

    def receive(app: Any, **fields: Any) -> None:
        found.append((shop.charges(), fields["attempts"], shop.idempotency.current.key == fields["key"]))  # type: ignore[union-attr]

    guard(shop, lambda: (charge(shop), "x")[1])
    with signals.executed.connected_to(receive, shop.app):
        assert 200 == send(shop, new_key()).status_code
    assert [(1, 1, True)] == found


def test_the_retention_of_one_record(atomic: Shop) -> None:
    """The view sets how long its record is kept, in atomic mode as in the other."""

    def view() -> str:
        charge(atomic)
        atomic.idempotency.current.retention = 60  # type: ignore[union-attr]
        return "x"

    guard(atomic, view)
    key = new_key()
    send(atomic, key)
    (row,) = atomic.rows()
    assert 60 == round((row["expires_at"] - row["completed_at"]).total_seconds())
    atomic.shift(61)
    assert "Idempotent-Replay" not in send(atomic, key).headers
    assert ([100, 100], 1) == (amounts(atomic), len(atomic.rows()))
