"""``IDEMPOTENCY_ON_ERROR`` and ``IDEMPOTENCY_STALE``: what a failure leaves, and what becomes of held keys."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Response, abort, copy_current_request_context, stream_with_context
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Session

from flask_idempotency import Idempotency
from flask_idempotency.errors import ConfigurationError, OptionError
from flask_idempotency.heartbeat import heartbeat
from tests.support.apps import Shop, close, events, make_shop, new_key, until
from tests.support.barrier import background
from tests.support.guarded import (
    Broken,
    assert_free,
    assert_held,
    commit,
    commit_and_fail,
    fine,
    guard,
    refusal,
    send,
    statuses,
)
from tests.support.proxy import CuttingProxy


def fail() -> Any:
    raise Broken


FAILURES: dict[str, tuple[Callable[[], Any], int]] = {
    "raises": (fail, 500),
    "returns 500": (lambda: ("sorry", 500), 500),
    "returns 503": (lambda: ("later", 503), 503),
    "aborts": (lambda: abort(503), 503),
    "mapped": (lambda: {}[0], 502),
}


def failing(shop: Shop, name: str, before: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """A view's doing, ``before`` and then one of the failures, and the status of its answer."""
    shop.app.register_error_handler(KeyError, lambda error: ("mapped", 502))
    end, status = FAILURES[name]

    def do() -> Any:
        before()
        return end()

    return do, status


class TestAuto:
    """``auto``, the default: held if something was committed, else released."""

    @pytest.mark.scenario(42)
    @pytest.mark.parametrize("failure", FAILURES)
    def test_a_failure_after_a_commit(self, shop: Shop, failure: str) -> None:
        """Committed and then failed in whatever way: the key is held, and the view does not run again."""
        do, status = failing(shop, failure, lambda: commit(shop))
        guard(shop, do)
        key = new_key()
        with events(shop.app) as seen:
            assert status == send(shop, key).status_code
            assert ["held"] == [name for name, _ in seen]
            assert_held(shop, key)
        assert ["held", "conflicted", "conflicted"] == [name for name, _ in seen]
        assert 1 == shop.charges()

    @pytest.mark.scenario(14)
    @pytest.mark.parametrize("failure", FAILURES)
    def test_a_failure_before_any_commit(self, light: Shop, failure: str) -> None:
        """Failed before anything was written: released, whatever the failure."""
        do, status = failing(light, failure, lambda: None)
        guard(light, do, fine)
        key = new_key()
        with events(light.app) as seen:
            assert status == send(light, key).status_code
        assert ["released"] == [name for name, _ in seen]
        assert_free(light, key)

    @pytest.mark.scenario(42)
    @pytest.mark.parametrize("position", ["before", "after"])
    @pytest.mark.parametrize("commits", [True, False])
    def test_a_hook_that_raises(self, shop: Shop, position: str, commits: bool) -> None:
        """A hook that raises after the view, wherever it is registered: what the view committed decides."""
        fails = [True]

        def hook(response: Response) -> Response:
            if fails:
                fails.clear()
                raise Broken
            return response

        if position == "before":
            shop.app.after_request_funcs[None].insert(0, hook)
        else:
            shop.app.after_request(hook)
        guard(shop, (lambda: (commit(shop), fine())[1]) if commits else fine)
        key = new_key()
        assert 500 == send(shop, key).status_code
        if commits:
            assert_held(shop, key)
        else:
            assert_free(shop, key)

    @pytest.mark.scenario(49)
    @pytest.mark.parametrize("setting", ["PROPAGATE_EXCEPTIONS", "TESTING", "DEBUG"])
    def test_an_exception_that_escapes(self, light: Shop, setting: str) -> None:
        """An exception that Flask lets through, in testing, in debug or by configuration, holds as well."""
        light.app.config[setting] = True
        guard(light, commit_and_fail(light))
        key = new_key()
        with events(light.app) as seen, pytest.raises(Broken):
            send(light, key)
        assert [("held", "Broken")] == [(name, fields["exception"]) for name, fields in seen]
        assert_held(light, key)

    def test_what_the_log_says(self, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
        """One error names what was seen and what to do, without values."""
        guard(shop, lambda: (commit(shop, 918_273), commit(shop, 918_274), fail()))
        key = new_key()
        with caplog.at_level(logging.INFO, "flask_idempotency"):
            send(shop, key)
        (record,) = [one for one in caplog.records if one.name == "flask_idempotency"]
        assert ("idempotency.hold", logging.ERROR) == (record.event, record.levelno)  # type: ignore[attr-defined]
        message = record.getMessage()
        assert 'seen="INSERT INTO charge (and 1 more)"' in message
        assert "flask idempotency release SCOPE KEY" in message
        assert "idempotency.settle(scope, key, response)" in message
        assert f"key={key} scope=acme method=POST path=/do endpoint=do" in message
        assert "91827" not in message

    @pytest.mark.scenario(14)
    def test_the_views_own_constraint(self, shop: Shop) -> None:
        """A view that fails on its own constraint has committed nothing: the retry runs, no 409."""

        def do() -> Any:
            shop.db.session.add_all([shop.Charge(id=1, amount=1), shop.Charge(id=1, amount=2)])
            shop.db.session.commit()

        guard(shop, do, fine)
        key = new_key()
        assert 500 == send(shop, key).status_code
        assert_free(shop, key)

    def test_a_refused_commit(self, postgres_url: str) -> None:
        """A commit that the database refused is none: released."""
        shop = make_shop(postgres_url)
        shop.execute(sa.text("CREATE TABLE paid (id INTEGER REFERENCES charge (id) DEFERRABLE INITIALLY DEFERRED)"))

        def do() -> Any:
            shop.db.session.execute(sa.text("INSERT INTO paid VALUES (77)"))
            shop.db.session.commit()

        guard(shop, do, fine)
        key = new_key()
        assert 500 == send(shop, key).status_code
        assert_free(shop, key)
        close(shop.app)

    def test_what_is_rolled_back_or_only_read(self, shop: Shop) -> None:
        """Writes that are rolled back, a commit of reads, and writes never committed: released."""

        def read() -> Any:
            shop.db.session.execute(sa.select(shop.Charge)).all()
            shop.db.session.commit()

        def roll_back() -> Any:
            shop.db.session.add(shop.Charge(amount=1))
            shop.db.session.flush()
            shop.db.session.rollback()

        def forget() -> Any:
            shop.db.session.add(shop.Charge(amount=1))
            shop.db.session.flush()

        def savepoint() -> Any:
            shop.db.session.begin_nested().commit()
            shop.db.session.add(shop.Charge(amount=1))
            shop.db.session.begin_nested().commit()
            shop.db.session.rollback()

        guard(shop, *[lambda do=do: (do(), fail()) for do in (read, roll_back, forget, savepoint)], fine)
        key = new_key()
        for _ in range(4):
            assert (500, []) == (send(shop, key).status_code, shop.rows())
        assert (201, 0, 5) == (send(shop, key).status_code, shop.charges(), len(shop.runs))

    def test_rolled_back_after_a_commit(self, shop: Shop) -> None:
        """A rollback takes back what came after the commit, and no more: held."""

        def do() -> Any:
            commit(shop)
            shop.db.session.add(shop.Charge(amount=2))
            shop.db.session.flush()
            shop.db.session.rollback()
            fail()

        guard(shop, do)
        key = new_key()
        assert 500 == send(shop, key).status_code
        assert_held(shop, key)


# By which way something can be committed


def by_another_session(shop: Shop) -> None:
    with Session(shop.db.engine) as session:
        session.add(shop.Charge(amount=1))
        session.commit()


def by_engine(shop: Shop) -> None:
    with shop.db.engine.begin() as connection:
        connection.execute(sa.insert(shop.Charge.__table__).values(amount=1))


def by_text(shop: Shop) -> None:
    shop.db.session.execute(sa.text("INSERT INTO charge (amount) VALUES (1)"))
    shop.db.session.commit()


def by_autocommit(shop: Shop) -> None:
    with shop.db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.insert(shop.Charge.__table__).values(amount=1))


def by_thread_with_copied_request(shop: Shop) -> None:
    background(copy_current_request_context(lambda: commit(shop))).result(20)


def by_thread_with_copied_context(shop: Shop) -> None:
    background(contextvars.copy_context().run, by_another_session, shop).result(20)


def by_driver(shop: Shop) -> None:
    connection = shop.db.engine.raw_connection()
    connection.cursor().execute("INSERT INTO charge (amount) VALUES (1)")
    connection.commit()
    connection.close()


WAYS = [
    by_another_session,
    by_engine,
    by_text,
    by_autocommit,
    by_thread_with_copied_request,
    by_thread_with_copied_context,
    by_driver,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda one: one.__name__)
def test_ways_of_committing(shop: Shop, way: Callable[[Shop], None]) -> None:
    """Whatever session, connection or thread of the request commits, through the app's engines: held."""
    guard(shop, lambda: (way(shop), fail()))
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert 1 == shop.charges()
    assert_held(shop, key)


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("commits", [True, False])
def test_coroutines(shop: Shop, aside: bool, commits: bool) -> None:
    """What a coroutine commits, by itself or in a thread that it waits for, is seen as well."""
    done: list[str] = []

    @shop.app.post("/do")
    @shop.idempotency.required
    async def do() -> Any:
        shop.runs.append("run")
        if done:
            return fine()
        done.append("done")
        if commits and aside:
            await asyncio.to_thread(by_another_session, shop)
        elif commits:
            commit(shop)
        await asyncio.sleep(0)
        raise Broken

    key = new_key()
    assert 500 == send(shop, key).status_code
    if commits:
        assert_held(shop, key)
    else:
        assert_free(shop, key)


def test_another_bind(sqlite_url: str, tmp_path: Path) -> None:
    """A commit to another of the app's databases holds the key as well."""
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
    app.config["SQLALCHEMY_BINDS"] = {"ledger": f"sqlite:///{tmp_path / 'ledger.sqlite'}"}
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)

    class Entry(db.Model):  # type: ignore[name-defined]
        __bind_key__ = "ledger"
        id = sa.Column(sa.Integer, primary_key=True)

    shop = Shop(app, idempotency, db, Entry)
    idempotency.scope_loader(lambda: "acme")
    with app.app_context():
        db.create_all()

    def do() -> Any:
        db.session.add(Entry())
        db.session.commit()
        fail()

    guard(shop, do)
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert_held(shop, key)
    close(app)


@pytest.fixture
def side(tmp_path: Path) -> Iterator[sa.Engine]:
    """An engine that the app uses beside its own, with one table."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'side.sqlite'}")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE entry (id INTEGER)"))
    yield engine
    engine.dispose()


def test_written_before_the_claim(shop: Shop, side: sa.Engine) -> None:
    """What a hook wrote before the claim and the view commits after it counts."""
    connections: list[sa.Connection] = []

    @shop.app.before_request
    def begin() -> None:
        connections.append(side.connect())
        connections[-1].execute(sa.text("INSERT INTO entry VALUES (1)"))

    @shop.app.teardown_request
    def end(error: BaseException | None) -> None:
        connections.pop().close()

    guard(shop, lambda: (connections[-1].commit(), fail()))
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert_held(shop, key)


def test_committed_before_the_claim(shop: Shop) -> None:
    """What a hook has committed before the claim does not count: a retry commits it again without the view."""
    shop.app.before_request(lambda: commit(shop))
    guard(shop, fail, fine)
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert_free(shop, key)


@pytest.mark.parametrize("how", ["after_request", "teardown_request", "error handler"])
def test_committed_after_the_view(shop: Shop, how: str) -> None:
    """What a hook or an error handler commits after the view counts."""
    if how == "after_request":
        shop.app.after_request(lambda response: (commit(shop), response)[1])
    elif how == "teardown_request":
        shop.app.teardown_request(lambda error: commit(shop))
    else:
        shop.app.register_error_handler(Broken, lambda error: (commit(shop), ("sorry", 500))[1])
    guard(shop, fail)
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert (["run"], ["held"]) == (shop.runs, statuses(shop))
    assert (409, "outcome-unknown", False) == refusal(send(shop, key))


def test_commits_of_other_requests(shop: Shop) -> None:
    """What other requests commit meanwhile, guarded or not, holds nobody's key but their own."""
    entered, go = threading.Event(), threading.Event()

    def do() -> Any:
        entered.set()
        assert go.wait(20)
        fail()

    shop.app.post("/free", endpoint="free")(lambda: (commit(shop), "free")[1])
    guard(shop, do, fine)
    key = new_key()
    first = background(send, shop, key)
    assert entered.wait(20)
    assert (200, 201) == (shop.client.post("/free").status_code, shop.charge(new_key()).status_code)
    assert 2 == shop.charges()
    go.set()
    assert 500 == first.result(20).status_code
    assert [("completed", "/charges")] == [(row["status"], row["request_path"]) for row in shop.rows()]
    assert 201 == send(shop, key).status_code


@pytest.mark.scenario(41)
@pytest.mark.parametrize("how", ["abort", "return"])
@pytest.mark.parametrize("status", [401, 403, 409, 429])
@pytest.mark.parametrize("on_error", ["auto", "hold", "record"])
def test_answers_that_ask_for_another_try(
    make_light: Callable[..., Shop], how: str, status: int, on_error: str
) -> None:
    """The seven statuses that ask for another try are released, whatever was committed: ON_ERROR is about 5xx."""
    shop = make_light(on_error=on_error)
    guard(shop, lambda: (commit(shop), abort(status) if how == "abort" else ("again", status))[1], fine)
    key = new_key()
    assert status == send(shop, key).status_code
    assert_free(shop, key)


@pytest.mark.parametrize("on_error", ["auto", "release", "record", "hold"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("testing", [False, True])
def test_current_release(make_light: Callable[..., Shop], on_error: str, failure: str, testing: bool) -> None:
    """A view that releases its claim has its way, whatever it committed and however it fails then."""
    shop = make_light(on_error=on_error)
    shop.app.testing = testing

    def before() -> None:
        commit(shop)
        assert shop.idempotency.current is not None
        shop.idempotency.current.release()

    do, _ = failing(shop, failure, before)
    guard(shop, do, fine)
    key = new_key()
    with suppress(Broken):
        send(shop, key)
    assert_free(shop, key)


def test_without_the_store(light: Shop) -> None:
    """A view that runs unguarded, as the app chose for when there is no store, holds nothing."""
    guard(light, commit_and_fail(light), on_store_error="execute")
    light.execute(sa.text("DROP TABLE idempotency_keys"))
    key = new_key()
    with events(light.app) as seen:
        assert [500, 500] == [send(light, key).status_code for _ in range(2)]
    assert (2, {"record_failed", "unguarded"}) == (len(light.runs), {name for name, _ in seen})


class TestSubRequests:
    """What a view commits through requests that it makes itself."""

    @pytest.mark.parametrize("inner", ["optional", "method", "unguarded"])
    def test_without_a_claim(self, shop: Shop, inner: str) -> None:
        """A request that needs no claim, and commits, has committed for the view that made it: held."""
        wrap = {
            "optional": shop.idempotency.optional,
            "method": shop.idempotency.required,
            "unguarded": lambda view: view,
        }

        def committing() -> str:
            commit(shop)
            return "done"

        shop.app.add_url_rule("/inner", "inner", wrap[inner](committing), methods=["POST", "PUT"])

        def outer() -> Any:
            client = shop.app.test_client()
            ask = client.put if inner == "method" else client.post
            assert "done" == ask("/inner", headers={"X-Tenant": "acme"}).text
            raise Broken

        guard(shop, outer)
        key = new_key()
        assert 500 == send(shop, key).status_code
        assert_held(shop, key)
        assert 1 == shop.charges()


class TestStreams:
    """Streamed answers."""

    @pytest.mark.parametrize("committed", ["in the view", "in the stream", "never"])
    def test_a_5xx(self, shop: Shop, committed: str) -> None:
        """A streamed 5xx holds the key if the view or the stream itself has committed."""

        def chunks() -> Iterator[str]:
            yield "a"
            if committed == "in the stream":
                commit(shop)
            yield "b"

        def do() -> Any:
            if committed == "in the view":
                commit(shop)
            return stream_with_context(chunks()), 503

        guard(shop, do, fine)
        key = new_key()
        answer = send(shop, key)
        assert (503, "ab") == (answer.status_code, answer.text)
        if committed == "never":
            assert_free(shop, key)
        else:
            assert_held(shop, key)

    @pytest.mark.parametrize("gone", [False, True])
    def test_a_5xx_that_is_not_read(self, light: Shop, gone: bool) -> None:
        """A client that goes away in the middle of a streamed 5xx changes nothing of that."""

        def chunks() -> Iterator[str]:
            yield "a"
            commit(light)
            yield "b"

        guard(light, lambda: (stream_with_context(chunks()), 503))
        key = new_key()
        headers = {"X-Tenant": "acme", "Idempotency-Key": key}
        answer = light.client.post("/do", headers=headers, buffered=False)
        if gone:
            assert b"a" == next(iter(answer.response))
        answer.close()
        assert_held(light, key)

    @pytest.mark.parametrize("commits", [True, False])
    def test_a_5xx_that_is_forgotten(self, light: Shop, commits: bool) -> None:
        """A streamed 5xx that nobody reads to its end or closes is held or released by what was committed."""

        def do() -> Any:
            if commits:
                commit(light)
            return iter(["a", "b"]), 503

        guard(light, do, fine)
        key = new_key()
        headers = {"X-Tenant": "acme", "Idempotency-Key": key}
        with events(light.app) as seen:
            answer = light.client.post("/do", headers=headers, buffered=False)
            del answer
            gc.collect()
            until(lambda: not heartbeat._postponed and seen)
        assert ["held" if commits else "released"] == [name for name, _ in seen]
        if commits:
            assert_held(light, key)
        else:
            assert_free(light, key)

    def test_a_long_5xx(self, make_light: Callable[..., Shop]) -> None:
        """A streamed 5xx that is larger than what is ever kept is followed to its end all the same."""
        shop = make_light(max_body=10)

        def chunks() -> Iterator[bytes]:
            yield from [b"x" * 100] * 3
            commit(shop)
            yield b"end"

        guard(shop, lambda: (stream_with_context(chunks()), 503))
        key = new_key()
        assert 303 == len(send(shop, key).data)
        assert_held(shop, key)

    def test_without_a_request_context(self, shop: Shop) -> None:
        """A streamed 5xx that commits in an app context of its own, with no request's, holds the key."""

        def chunks() -> Iterator[str]:
            yield "a"
            with shop.app.app_context():
                commit(shop)
            yield "b"

        guard(shop, lambda: Response(chunks(), 502))
        key = new_key()
        assert (502, "ab") == ((first := send(shop, key)).status_code, first.text)
        assert_held(shop, key)
        assert 1 == shop.charges()

    def test_a_stream_that_breaks_off(self, light: Shop) -> None:
        """A stream that raises after bytes have left completes the key: neither held nor run again."""

        def chunks() -> Iterator[str]:
            yield "a"
            raise Broken

        guard(light, lambda: (commit(light), chunks())[1])
        key = new_key()
        with pytest.raises(Broken):
            send(light, key)
        assert (409, "record-unavailable", False) == refusal(send(light, key))
        assert (["run"], ["completed"]) == (light.runs, statuses(light))


class TestRelease:
    """``release``: as if nothing had been done."""

    @pytest.mark.parametrize("failure", FAILURES)
    @pytest.mark.parametrize("where", ["config", "keyword"])
    def test_it_runs_again(self, make_light: Callable[..., Shop], failure: str, where: str) -> None:
        """Committed or not, a failure gives the key back; the view commits again."""
        shop = make_light(**({"on_error": "release"} if where == "config" else {}))
        do, status = failing(shop, failure, lambda: commit(shop))
        guard(shop, do, fine, **({} if where == "config" else {"on_error": "release"}))
        key = new_key()
        assert status == send(shop, key).status_code
        assert_free(shop, key)


class TestRecord:
    """``record``: the 5xx is the answer from now on."""

    @pytest.mark.scenario(42)
    @pytest.mark.parametrize("failure", FAILURES)
    def test_the_answer_is_replayed(self, make: Callable[..., Shop], failure: str) -> None:
        """The failure's answer is recorded, and retries get it, byte for byte, with the marker."""
        shop = make(on_error="record")
        do, status = failing(shop, failure, lambda: commit(shop))
        guard(shop, do)
        shop.app.after_request(lambda response: response.headers.add("X-Later", "yes") or response)
        key = new_key()
        first = send(shop, key)
        assert status == first.status_code
        assert_replayed(shop, key, first)

    def test_without_a_commit(self, make_light: Callable[..., Shop]) -> None:
        """It does not matter what was committed."""
        shop = make_light(on_error="record")
        guard(shop, fail)
        key = new_key()
        assert_replayed(shop, key, send(shop, key))

    @pytest.mark.parametrize("setting", ["PROPAGATE_EXCEPTIONS", "TESTING", "DEBUG"])
    def test_an_exception_that_escapes(self, make: Callable[..., Shop], setting: str) -> None:
        """An exception that Flask lets through is recorded as the 500 that the server makes of it."""
        shop = make(on_error="record")
        shop.app.config[setting] = True
        guard(shop, commit_and_fail(shop))
        key = new_key()
        with events(shop.app) as seen, pytest.raises(Broken):
            send(shop, key)
        assert [("executed", 500)] == [(name, fields["status"]) for name, fields in seen]
        retry = send(shop, key)
        assert (500, "true") == (retry.status_code, retry.headers["Idempotent-Replay"])
        assert "Internal Server Error" in retry.text
        assert "Broken" not in retry.text
        assert (["run"], ["completed"]) == (shop.runs, statuses(shop))

    @pytest.mark.scenario(42)
    @pytest.mark.parametrize("position", ["before", "after"])
    def test_a_hook_that_raises(self, make_light: Callable[..., Shop], position: str) -> None:
        """The 500 that a failing hook makes of the view's answer is the answer."""
        shop = make_light(on_error="record")
        fails = [True]

        def hook(response: Response) -> Response:
            if fails:
                fails.clear()
                raise Broken
            return response

        if position == "before":
            shop.app.after_request_funcs[None].insert(0, hook)
        else:
            shop.app.after_request(hook)
        guard(shop, lambda: (commit(shop), fine())[1])
        key = new_key()
        first = send(shop, key)
        assert 500 == first.status_code
        assert_replayed(shop, key, first)

    @pytest.mark.parametrize("says", [True, False])
    def test_the_apps_rule_for_answers(self, make_light: Callable[..., Shop], says: bool) -> None:
        """``IDEMPOTENCY_RECORD`` decides about the view's own 5xx, and ON_ERROR about what exceptions become."""
        shop = make_light(on_error="release" if says else "record", record=lambda response: says)
        guard(shop, lambda: ("sorry", 500))
        key = new_key()
        first = send(shop, key)
        if says:
            assert_replayed(shop, key, first)
        else:
            assert [] == shop.rows()
        shop.app.view_functions["do"] = shop.idempotency.required(fail)
        key = new_key()
        assert 500 == send(shop, key).status_code
        assert (not says) == (key in [row["key"] for row in shop.rows()])


def assert_replayed(shop: Shop, key: str, first: Any) -> None:
    """Retries get the first answer's status, headers and body; the view does not run again."""
    for _ in range(2):
        retry = send(shop, key)
        assert (first.status, first.data, "true") == (retry.status, retry.data, retry.headers["Idempotent-Replay"])
        left = {(name, value) for name, value in retry.headers if name != "Idempotent-Replay"}
        assert set(first.headers) == left
    assert (["run"], ["completed"]) == (shop.runs, statuses(shop))


class TestHold:
    """``hold``: whatever fails waits for a person."""

    @pytest.mark.parametrize("failure", FAILURES)
    @pytest.mark.parametrize("where", ["config", "keyword"])
    def test_without_a_commit(self, make_light: Callable[..., Shop], failure: str, where: str) -> None:
        """A failure holds the key though nothing was committed; the log says that it was so configured."""
        shop = make_light(**({"on_error": "hold"} if where == "config" else {}))
        do, status = failing(shop, failure, lambda: None)
        guard(shop, do, **({} if where == "config" else {"on_error": "hold"}))
        key = new_key()
        with events(shop.app) as seen:
            assert status == send(shop, key).status_code
        assert [("held", "on_error='hold'")] == [(name, fields["seen"]) for name, fields in seen]
        assert_held(shop, key)

    @pytest.mark.parametrize("status", [200, 404])
    def test_final_answers(self, make_light: Callable[..., Shop], status: int) -> None:
        """What is no failure is recorded as ever."""
        shop = make_light(on_error="hold")
        guard(shop, lambda: (commit(shop), ("text", status))[1])
        key = new_key()
        assert [status] * 2 == [send(shop, key).status_code for _ in range(2)]
        assert ["completed"] == statuses(shop)

    @pytest.mark.parametrize("where", ["required", "optional", "protect"])
    def test_with_atomic_in_one_decorator(self, light: Shop, where: str) -> None:
        """A decorator with both is refused where it stands."""
        arguments = (light.app,) if where == "protect" else ()
        with pytest.raises(OptionError, match="atomic and on_error='hold' contradict each other"):
            getattr(light.idempotency, where)(*arguments, atomic=True, on_error="hold")

    def test_with_atomic_in_the_configuration(self, make_light: Callable[..., Shop]) -> None:
        """A configuration with both is refused by ``init_app``."""
        with pytest.raises(OptionError, match="atomic and on_error='hold' contradict each other"):
            make_light(atomic=True, on_error="hold")

    @pytest.mark.parametrize(
        ("config", "protection", "keywords"),
        [
            ({"atomic": True}, None, {"on_error": "hold"}),
            ({"on_error": "hold"}, None, {"atomic": True}),
            ({}, {"atomic": True}, {"on_error": "hold"}),
            ({"on_error": "hold"}, {"atomic": True}, {}),
        ],
    )
    def test_with_atomic_where_options_combine(
        self, make_light: Callable[..., Shop], config: Any, protection: Any, keywords: Any
    ) -> None:
        """Where they meet only in the complete app, no request is served, on whichever route, not even the first."""
        shop = make_light(**config)
        shop.app.testing = True
        shop.app.get("/other")(lambda: "other")
        guard(shop, fine, **keywords)
        if protection is not None:
            shop.idempotency.protect(shop.app, paths="^/do", **protection)
        for _ in range(2):
            for path, method in (("/other", "GET"), ("/do", "POST")):
                with pytest.raises(ConfigurationError, match="atomic and on_error='hold' contradict each other"):
                    shop.client.open(path, method=method, headers={"X-Tenant": "acme", "Idempotency-Key": new_key()})
        assert ([], []) == (shop.runs, shop.rows())


class TestStale:
    """``IDEMPOTENCY_STALE=reject``."""

    @pytest.mark.scenario(73)
    def test_a_killed_holder(self, make: Callable[..., Shop]) -> None:
        """A key whose holder was killed is in flight within the lease, and then unknown for as long as it takes."""
        shop = make(stale="reject")
        guard(shop, die, fine)
        key = new_key()
        with pytest.raises(SystemExit):
            send(shop, key)
        assert (409, "in-flight", True) == refusal(send(shop, key))
        for seconds in (40, 90_000, 90_000):
            shop.shift(seconds)
            assert (409, "outcome-unknown", False) == refusal(send(shop, key))
            assert 0 == prune(shop)
        assert (["run"], ["in_progress"]) == (shop.runs, statuses(shop))
        assert (422, "key-reused", False) == refusal(send(shop, key, json={"other": 1}))

    @pytest.mark.parametrize(("holder", "asker"), [("reject", "reexecute"), ("reexecute", "reject")])
    def test_the_holders_policy_decides(self, make: Callable[..., Shop], holder: str, asker: str) -> None:
        """The policy that counts is the holder's, not that of whoever asks."""
        first, second = make(stale=holder), make(stale=asker)
        for shop in (first, second):
            guard(shop, die if shop is first else fine)
        key = new_key()
        with pytest.raises(SystemExit):
            send(first, key)
        first.shift(40)
        answer = send(second, key)
        if holder == "reject":
            assert ((409, "outcome-unknown", False), []) == (refusal(answer), second.runs)
        else:
            assert (201, ["run"]) == (answer.status_code, second.runs)


def die() -> Any:
    """A worker is stopped in the middle of the view."""
    raise SystemExit


def prune(shop: Shop) -> int:
    with shop.app.app_context():
        return shop.idempotency.prune().deleted


class TestHeldKeys:
    """Keys that are held."""

    @pytest.mark.scenario(73)
    def test_they_stay(self, make: Callable[..., Shop]) -> None:
        """A held key is there a day and a prune later, and so is its 409."""
        shop = make(retention=60, lock_timeout=2)
        guard(shop, commit_and_fail(shop))
        key = new_key()
        assert 500 == send(shop, key).status_code
        for _ in range(2):
            shop.shift(90_000)
            assert 0 == prune(shop)
            assert_held(shop, key)

    @pytest.mark.parametrize("on_mismatch", ["reject", "replay"])
    @pytest.mark.parametrize("seconds", [0, 90_000])
    def test_another_request(self, make: Callable[..., Shop], on_mismatch: str, seconds: int) -> None:
        """Another request under a held key gets 422, however old it is; the key stays held."""
        shop = make(on_mismatch=on_mismatch)
        guard(shop, commit_and_fail(shop))
        key = new_key()
        send(shop, key)
        shop.shift(seconds)
        assert (422, "key-reused", False) == refusal(send(shop, key, json={"other": 1}))
        assert_held(shop, key)

    def test_waiting_does_not_help(self, make_light: Callable[..., Shop]) -> None:
        """A retry that may wait does not wait for a held key."""
        shop = make_light(wait=60)
        guard(shop, commit_and_fail(shop))
        key = new_key()
        send(shop, key)
        with events(shop.app) as seen:
            assert_held(shop, key)
        assert all(fields["waited"] < 30 for _, fields in seen)

    def test_taken_over_and_held(self, shop: Shop) -> None:
        """A second attempt, after a takeover, can be held, and the first one changes nothing of that any more."""
        entered, go = threading.Event(), threading.Event()

        def slow() -> Any:
            entered.set()
            assert go.wait(20)
            return fine()

        guard(shop, slow, commit_and_fail(shop))
        key = new_key()
        first = background(send, shop, key)
        assert entered.wait(20)
        shop.shift(40)
        with events(shop.app) as seen:
            assert 500 == send(shop, key).status_code
            go.set()
            assert 201 == first.result(20).status_code
            until(lambda: "claim_lost" in [name for name, _ in seen])
        assert ["taken_over", "held", "claim_lost"] == [name for name, _ in seen]
        assert_held(shop, key, runs=2)

    def test_held_by_who_was_taken_over(self, shop: Shop) -> None:
        """A holder that was taken over holds nothing: the other run's answer stays."""
        entered, go = threading.Event(), threading.Event()

        def slow() -> Any:
            entered.set()
            assert go.wait(20)
            commit(shop)
            fail()

        guard(shop, slow, fine)
        key = new_key()
        first = background(send, shop, key)
        assert entered.wait(20)
        shop.shift(40)
        with events(shop.app) as seen:
            assert 201 == send(shop, key).status_code
            go.set()
            assert 500 == first.result(20).status_code
            until(lambda: "claim_lost" in [name for name, _ in seen])
        assert ["taken_over", "executed", "claim_lost"] == [name for name, _ in seen]
        assert (["completed"], "true") == (statuses(shop), send(shop, key).headers["Idempotent-Replay"])


@pytest.mark.parametrize("stale", ["reexecute", "reject"])
def test_killed_before_the_hold_is_written(make: Callable[..., Shop], stale: str) -> None:
    """A worker that dies right before it writes that the key is held leaves it to the lease and STALE."""
    shop = make(stale=stale)
    guard(shop, commit_and_fail(shop), fine)

    def kill(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "SET status='held'" in statement:
            raise SystemExit

    sa.event.listen(sa.Engine, "before_cursor_execute", kill)
    key = new_key()
    try:
        with events(shop.app) as seen, pytest.raises(SystemExit):
            send(shop, key)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", kill)
    assert ([], ["in_progress"]) == (seen, statuses(shop))
    assert (409, "in-flight", True) == refusal(send(shop, key))
    shop.shift(40)
    answer = send(shop, key)
    if stale == "reject":
        assert ((409, "outcome-unknown", False), ["run"]) == (refusal(answer), shop.runs)
    else:
        assert (201, 2) == (answer.status_code, len(shop.runs))


@pytest.mark.scenario(59)
def test_a_hold_that_cannot_be_written(
    tcp_url: str, cutting_proxy: CuttingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """With the database gone the hold is repeated until it is written; not before is it called unknown."""
    shop = make_shop(tcp_url, engine_options={"pool_pre_ping": True}, lock_timeout=5)
    gone = cutting_proxy.gone()

    def do() -> Any:
        commit(shop)
        gone.__enter__()
        fail()

    guard(shop, do)
    key = new_key()
    try:
        with events(shop.app) as seen:
            try:
                assert 500 == send(shop, key).status_code
                assert ["record_failed"] == [name for name, _ in seen]
                assert (409, "in-flight", True) == refusal(send(shop, key))
                assert (422, "key-reused", False) == refusal(send(shop, key, json={"other": 1}))
            finally:
                gone.__exit__(None, None, None)
            until(lambda: not heartbeat._postponed and len(seen) > 3)  # the event follows the write
            assert ["record_failed", "conflicted", "mismatched", "held"] == [name for name, _ in seen]
            assert 'seen="INSERT INTO charge"' in caplog.text
        assert_held(shop, key)
    finally:
        close(shop.app)
