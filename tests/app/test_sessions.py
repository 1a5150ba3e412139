"""The app's session, transactions and pools: the extension uses none of them, and serves whatever they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Response, abort, g, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool, StaticPool
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from tests.support.apps import Shop, close, events, make_shop, new_key, until
from tests.support.barrier import background, together

View = Callable[..., Any]

#: Whoever waits for SQLite's writer waits for longer than pytest lets a test take.
PATIENT = {"connect_args": {"timeout": 90}}


@pytest.fixture
def patient(make: Callable[..., Shop], database_url: str) -> Shop:
    """A shop in which a wait for SQLite's writer fails the test."""
    return make(engine_options=PATIENT if "sqlite" in database_url else None)


def send(shop: Shop, key: str, path: str = "/x", **options: Any) -> TestResponse:
    """A request of the tenant ``acme``."""
    headers = {"Idempotency-Key": key, "X-Tenant": "acme", **options.pop("headers", {})}
    return shop.client.post(path, headers=headers, **options)


def add(shop: Shop, view: View, path: str = "/x") -> None:
    """A guarded view."""
    shop.app.add_url_rule(path, path, shop.idempotency.required(view), methods=["POST"])


def assert_replayed(answer: TestResponse, first: TestResponse) -> None:
    """Assert that an answer is the replay of the first one."""
    assert (first.status_code, first.data) == (answer.status_code, answer.data)
    assert "true" == answer.headers["Idempotent-Replay"]


@contextmanager
def watched_pool(shop: Shop) -> Iterator[list[str]]:
    """What happens meanwhile to the connections of the app's own engine: checkouts, commits, rollbacks."""
    with shop.app.app_context():
        engine = shop.db.engine
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    listeners = {(target, name): note(name) for target, name in [(engine, "commit"), (engine, "rollback")]}
    listeners[engine.pool, "checkout"] = note("checkout")
    for (target, name), listener in listeners.items():
        sa.event.listen(target, name, listener)
    try:
        yield seen
    finally:
        for (target, name), listener in listeners.items():
            sa.event.remove(target, name, listener)


# What the view does with its session


@pytest.mark.scenario(14)
def test_a_view_that_fails_on_a_constraint(shop: Shop) -> None:
    """A view that fails on the app's own constraint releases the claim, and the retry runs."""
    amounts: list[int | None] = [None, 100]

    def view() -> tuple[str, int]:
        shop.db.session.add(shop.Charge(amount=amounts.pop(0)))
        try:
            shop.db.session.commit()
        except IntegrityError:
            if request.headers.get("Conflict"):
                abort(409)
            raise
        return "charged", 201

    add(shop, view)
    key = new_key()
    assert 500 == send(shop, key).status_code
    first = send(shop, key)
    assert (201, 1) == (first.status_code, shop.charges())
    assert_replayed(send(shop, key), first)
    amounts[:] = [None, 100]
    key = new_key()
    assert [409, 201] == [send(shop, key, headers={"Conflict": "1"}).status_code for _ in range(2)]


@pytest.mark.scenario(15)
def test_a_view_that_commits_twice(shop: Shop) -> None:
    """The claim holds from the view's beginning to its end, over commits and rollbacks in it."""
    entered, go = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]

    def view() -> tuple[str, int]:
        for number in range(3):
            shop.db.session.add(shop.Charge(amount=number))
            if number == 2:
                shop.db.session.rollback()
            else:
                shop.db.session.commit()
            entered[number].set()
            assert go[number].wait(20)
        return "insufficient", 402

    add(shop, view)
    key = new_key()
    first = background(send, shop, key)
    for number in range(3):
        assert entered[number].wait(20)
        assert 409 == send(shop, key).status_code
        go[number].set()
    assert 402 == first.result(20).status_code
    assert_replayed(send(shop, key), first.result())
    assert 2 == shop.charges()


@pytest.mark.scenario(22)
def test_pending_objects_of_a_failing_view(shop: Shop) -> None:
    """What a view added or flushed and did not commit is never committed, whether it fails or answers."""

    def view() -> tuple[str, int]:
        shop.db.session.add(shop.Charge(amount=1))
        if "Flush" in request.headers:
            shop.db.session.flush()
        shop.db.session.add(shop.Charge(amount=2))
        if "Raise" in request.headers:
            raise ZeroDivisionError
        return "x", int(request.headers.get("Status", 201))

    add(shop, view)
    for headers in ({}, {"Flush": "1"}, {"Raise": "1"}, {"Flush": "1", "Raise": "1"}, {"Flush": "1", "Status": "503"}):
        key = new_key()
        answers = [send(shop, key, headers=headers) for _ in range(2)]
        kept = answers[0].status_code == 201
        assert kept == ("Idempotent-Replay" in answers[1].headers)
        assert 0 == shop.charges()


@pytest.mark.scenario(20)
def test_a_view_that_flushes_and_never_commits(patient: Shop) -> None:
    """A view that flushes and never commits has its answer recorded at once; its work is rolled back by the app."""
    add(patient, lambda: (patient.db.session.add(patient.Charge(amount=1)), patient.db.session.flush()) and "x")
    key = new_key()
    first = send(patient, key)
    assert_replayed(send(patient, key), first)
    assert ([200], 0) == ([row["response_status"] for row in patient.rows()], patient.charges())


def test_the_session_is_the_views_alone(shop: Shop) -> None:
    """Objects and the transaction of the app's session are the same before, in and after the view."""
    seen: dict[str, Any] = {}

    def state() -> tuple[Any, ...]:
        session = shop.db.session()
        return id(session), session.in_transaction(), len(session.new), [one.amount for one in session.new]

    @shop.app.before_request
    def before() -> None:
        shop.db.session.add(shop.Charge(amount=7))
        g.charge = next(iter(shop.db.session.new))
        seen["before"] = state()

    @shop.app.after_request
    def after(response: Response) -> Response:
        seen["after"] = state()
        return response

    def view() -> str:
        seen["view"] = state()
        assert g.charge in shop.db.session
        return "x"

    add(shop, view)
    key = new_key()
    for _ in range(2):
        seen.clear()
        assert "x" == send(shop, key).text
        assert 1 == len(set(map(repr, seen.values())))
    assert ["before", "after"] == list(seen)
    assert 0 == shop.charges()


def test_the_apps_pool_is_not_touched(make: Callable[..., Shop]) -> None:
    """A guarded view without database work takes no connection of the app's pool, first time, replay and refusal."""
    shop = make()
    add(shop, lambda: "x")
    send(shop, new_key())  # a new connection of the extension's own passes the app's listeners once
    key = new_key()
    with watched_pool(shop) as seen:
        answers = [send(shop, key), send(shop, key), send(shop, key, json={"a": 1})]
    assert [200, 200, 422] == [one.status_code for one in answers]
    assert [] == seen


def test_the_extension_commits_nothing_of_the_apps(shop: Shop) -> None:
    """The only commits and checkouts on the app's engine are those of the view."""
    shop.charge(new_key())
    key = new_key()
    with watched_pool(shop) as seen:
        shop.charge(key)
    # Reading the new id after the commit begins a transaction, which the end of the request rolls back.
    assert (1, 2) == (seen.count("commit"), seen.count("checkout"))
    with watched_pool(shop) as seen:
        shop.charge(key)
    assert [] == seen


# Hooks around the view


@pytest.mark.scenario(18)
def test_a_hook_that_uses_the_session_after_a_conflict(shop: Shop) -> None:
    """After a duplicate's conflict, a mismatch and a replay, the app's session works in its hooks."""
    counts: list[int] = []

    @shop.app.after_request
    def count(response: Response) -> Response:
        counts.append(shop.db.session.scalar(sa.select(sa.func.count()).select_from(shop.Charge)))
        shop.db.session.commit()
        return response

    entered, go = threading.Event(), threading.Event()

    def view() -> str:
        entered.set()
        assert go.wait(20)
        return "x"

    add(shop, view)
    key = new_key()
    first = background(send, shop, key)
    assert entered.wait(20)
    assert [409, 422] == [send(shop, key).status_code, send(shop, key, json={"a": 1}).status_code]
    go.set()
    assert 200 == first.result(20).status_code
    assert_replayed(send(shop, key), first.result())
    assert [0, 0, 0, 0] == counts


@pytest.mark.parametrize("order", ["dih", "idh", "hid", "hdi", "dhi", "ihd"])
@pytest.mark.scenario(22)
def test_the_order_of_initialisations(sqlite_url: str, order: str) -> None:
    """Whatever the order of the database's, the extension's and the app's own hooks, the outcome is the same."""
    app, db, idempotency, seen = Flask("shop"), SQLAlchemy(), Idempotency(), []
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url

    class Charge(db.Model):  # type: ignore[name-defined]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    def count(*args: Any) -> Any:
        seen.append(db.session.scalar(sa.select(sa.func.count()).select_from(Charge)))
        return args[0] if args else None

    def hooks() -> None:
        app.before_request(count)
        app.after_request(count)
        app.teardown_request(lambda error: count() and None)

    steps = {"d": lambda: db.init_app(app), "i": lambda: idempotency.init_app(app, db), "h": hooks}
    for step in order:
        steps[step]()
    idempotency.scope_loader(lambda: "acme")

    @app.post("/x")
    @idempotency.required
    def view() -> str:
        db.session.add(Charge(amount=1))
        db.session.flush()
        if request.headers.get("Commit"):
            db.session.commit()
            return "committed"
        raise ZeroDivisionError

    with app.app_context():
        db.create_all()
    client, key = app.test_client(), new_key()
    assert 500 == client.post("/x", headers={"Idempotency-Key": key}).status_code
    answers = [client.post("/x", headers={"Idempotency-Key": key, "Commit": "1"}) for _ in range(2)]
    assert ["committed", "committed"] == [one.text for one in answers]
    assert_replayed(answers[1], answers[0])
    # The failing view's own flush is seen by hooks within its request, and gone after it.
    assert [0, 1, 1] == seen[3:6]
    assert [1, 1, 1] == seen[6:9]
    close(app)


@pytest.fixture
def writing(patient: Shop) -> Shop:
    """A shop with a before_request that writes through the session, and commits if told to."""
    shop = patient

    @shop.app.before_request
    def audit_request() -> None:
        if "Audit" in request.headers:
            shop.db.session.add(shop.Charge(amount=0))
            shop.db.session.flush()
            if request.headers["Audit"] == "commit":
                shop.db.session.commit()

    add(shop, lambda: "x")
    return shop


def test_uncommitted_writes_of_a_hook(writing: Shop) -> None:
    """With one writer, a hook's uncommitted writes are 503 at once, naming the hook; on others they are no matter."""
    sqlite = writing.db.metadata and "sqlite" in writing.app.config["SQLALCHEMY_DATABASE_URI"]
    answer = send(writing, new_key(), headers={"Audit": "flush"})
    if sqlite:
        assert (503, "store-unavailable") == (answer.status_code, answer.json["type"].rpartition(":")[2])
        assert "audit_request" in answer.json["detail"]
        assert "_before" not in answer.json["detail"]
        assert "Retry-After" in answer.headers
        assert [] == writing.rows()
    else:
        assert 200 == answer.status_code
    assert 0 == writing.charges()


def test_committed_writes_of_a_hook(writing: Shop) -> None:
    """A hook that commits its writes is no hindrance on any database; it runs on the replay too."""
    key = new_key()
    first, retry = (send(writing, key, headers={"Audit": "commit"}) for _ in range(2))
    assert_replayed(retry, first)
    assert 2 == writing.charges()


def test_replays_need_no_writer(writing: Shop) -> None:
    """A replay is served while the app's own uncommitted writes hold the only writer."""
    key = new_key()
    first = send(writing, key)
    assert_replayed(send(writing, key, headers={"Audit": "flush"}), first)


@pytest.mark.parametrize("policy", ["reject", "execute"])
def test_uncommitted_writes_are_no_store_error(make_light: Callable[..., Shop], policy: str) -> None:
    """A hook's uncommitted writes are the app's mistake: the view never runs unguarded for them."""
    shop, runs = make_light(on_store_error=policy), []

    @shop.app.before_request
    def audit_request() -> None:
        shop.db.session.add(shop.Charge(amount=0))
        shop.db.session.flush()

    add(shop, lambda: runs.append("x") or "x")
    assert 503 == send(shop, new_key()).status_code
    assert [] == runs


@pytest.mark.parametrize("kind", ["view", "hook", "both"])
def test_uncommitted_writes_where_coroutines_run(make_light: Callable[..., Shop], kind: str) -> None:
    """A coroutine runs in another thread than its request: a hook's uncommitted writes are 503 at once all the same."""
    shop = make_light(engine_options=PATIENT)

    def write() -> None:
        shop.db.session.add(shop.Charge(amount=0))
        shop.db.session.flush()

    async def write_in_coroutine() -> None:
        write()

    async def view_in_coroutine() -> str:
        return "x"

    shop.app.before_request(write if kind == "view" else write_in_coroutine)
    add(shop, (lambda: "x") if kind == "hook" else view_in_coroutine)
    answer = send(shop, new_key())
    assert (503, True) == (answer.status_code, "Functions that ran before the view" in answer.json["detail"])


def test_a_coroutine_that_only_flushes_within_a_pushed_context(make_light: Callable[..., Shop]) -> None:
    """What a coroutine flushed in a context that outlives its request does not hold up the recording."""
    shop = make_light(engine_options=PATIENT)

    async def view() -> str:
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.flush()
        return "x"

    add(shop, view)
    with shop.app.app_context():
        key = new_key()
        first = send(shop, key)
        assert_replayed(send(shop, key), first)


# Pools


@pytest.fixture
def pooled(database_url: str) -> Iterator[Callable[..., Shop]]:
    """A function that makes a shop whose app has a pool of the given settings, and a hook that loads through it."""
    shops: list[Shop] = []

    def make(**engine_options: Any) -> Shop:
        shop = make_shop(database_url, engine_options=engine_options)

        @shop.app.before_request
        def load_user() -> None:
            g.users = shop.db.session.scalar(sa.select(sa.func.count()).select_from(shop.Charge))

        def view() -> tuple[dict[str, Any], int]:
            charge = shop.Charge(amount=100)
            shop.db.session.add(charge)
            shop.db.session.commit()
            total = shop.db.session.scalar(sa.select(sa.func.sum(shop.Charge.amount)))
            return {"id": charge.id, "total": total}, 201

        add(shop, view)
        shops.append(shop)
        return shop

    yield make
    for shop in shops:
        close(shop.app)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.scenario(16, 20)
def test_small_pools(pooled: Callable[..., Shop], size: int) -> None:
    """With a pool of one or two, ten parallel requests with distinct keys succeed, and so do their retries."""
    shop = pooled(pool_size=size, max_overflow=0, pool_timeout=20)
    keys = [new_key() for _ in range(10)]
    answers = together(10, lambda number: send(shop, keys[number]))
    assert {201} == {one.status_code for one in answers}
    assert 10 == shop.charges()
    for answer, retry in zip(answers, together(10, lambda number: send(shop, keys[number])), strict=True):
        assert_replayed(retry, answer)
    assert 10 == shop.charges() == len(shop.rows())


def test_no_pool(pooled: Callable[..., Shop]) -> None:
    """An app whose connections are not pooled works."""
    shop = pooled(poolclass=NullPool)
    keys = [new_key() for _ in range(4)]
    answers = together(4, lambda number: send(shop, keys[number]))
    assert {201} == {one.status_code for one in answers}
    assert_replayed(send(shop, keys[0]), answers[0])


@pytest.mark.scenario(16)
def test_no_connection_is_held_while_the_view_runs(make: Callable[..., Shop]) -> None:
    """While one view runs for long, more keys than the extension's pool has connections get through."""
    shop = make(pool_size=1)
    entered, go = threading.Event(), threading.Event()

    def slow() -> str:
        entered.set()
        assert go.wait(20)
        return "slow"

    add(shop, slow)
    first = background(send, shop, new_key())
    assert entered.wait(20)
    assert [201] * 3 == [shop.charge(new_key()).status_code for _ in range(3)]
    go.set()
    assert "slow" == first.result(20).text


@pytest.mark.scenario(20)
def test_threads_on_one_database(shop: Shop) -> None:
    """Several threads with distinct keys at once get their answers, and no database is locked."""

    def work(number: int) -> list[int]:
        return [shop.charge(new_key()).status_code for _ in range(5)]

    assert [[201] * 5] * 4 == together(4, work)
    assert 20 == shop.charges() == len(shop.rows())


@pytest.mark.scenario(17)
def test_idle_transactions_that_the_database_ends(postgres_url: str) -> None:
    """A server that ends transactions idle for a second does not hinder a view that takes two."""
    options = {"connect_args": {"options": "-c idle_in_transaction_session_timeout=1000"}}
    shop = make_shop(postgres_url, engine_options=options)

    def view() -> tuple[str, int]:
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        threading.Event().wait(2)
        return "slow", 201

    add(shop, view)
    key = new_key()
    first = send(shop, key)
    assert 201 == first.status_code
    assert_replayed(send(shop, key), first)
    close(shop.app)


def test_settings_of_the_apps_engine_are_kept(postgres_url: str) -> None:
    """The extension's connections are made as the app's are, listeners and connect arguments included."""
    shop = make_shop(postgres_url, engine_options={"connect_args": {"application_name": "shop-of-tests"}})
    with shop.app.app_context():
        engine = shop.db.engine
    made: list[Any] = []
    sa.event.listen(engine, "connect", lambda connection, record: made.append(connection))
    add(shop, lambda: "x")
    assert 200 == send(shop, new_key()).status_code
    assert len(made) >= 1
    names = shop.execute(
        sa.text("SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database()")
    )
    assert [("shop-of-tests",)] == names
    close(shop.app)


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ", "AUTOCOMMIT"])
def test_isolation_levels_of_the_app(postgres_url: str, level: str) -> None:
    """Whatever the app's isolation level is, five duplicates at once run once."""
    shop = make_shop(postgres_url, engine_options={"isolation_level": level})
    key = new_key()
    statuses = {one.status_code for one in together(5, lambda _: shop.charge(key))}
    assert {201} <= statuses <= {201, 409}
    assert 1 == shop.charges() == len(shop.runs)
    close(shop.app)


# SQLite in memory


@pytest.fixture(params=["sqlite://", "sqlite:///:memory:", "static"])
def memory(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A shop on SQLite in memory, where nothing is apart from the app's own connection."""
    static = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    url = "sqlite://" if request.param == "static" else request.param
    shop = make_shop(url, engine_options=static if request.param == "static" else None)
    yield shop
    close(shop.app)


def test_in_memory(memory: Shop) -> None:
    """SQLite in memory works in one thread: first run, replay and mismatch."""
    key = new_key()
    first = memory.charge(key)
    assert_replayed(memory.charge(key), first)
    assert 422 == memory.charge(key, amount=900).status_code
    assert 1 == memory.charges() == len(memory.runs) == len(memory.rows())


def test_releases_in_memory(memory: Shop) -> None:
    """A released key can be used again at once in memory too."""
    statuses = [503, 201]
    add(memory, lambda: ("x", statuses.pop(0)))
    key = new_key()
    assert [503, 201, 201] == [send(memory, key).status_code for _ in range(3)]


@pytest.mark.parametrize("ends", ["commit", "rollback", "neither"])
def test_pending_work_in_memory_is_never_committed(memory: Shop, ends: str) -> None:
    """What the view left uncommitted on the one connection is committed by the app or not at all."""

    def view() -> str:
        memory.db.session.add(memory.Charge(amount=1))
        memory.db.session.flush()
        if ends != "neither":
            getattr(memory.db.session, ends)()
        return "x"

    add(memory, view)
    key = new_key()
    first = send(memory, key)
    assert_replayed(send(memory, key), first)
    assert (1 if ends == "commit" else 0) == memory.charges()


def test_a_hooks_pending_work_in_memory(memory: Shop) -> None:
    """A hook's uncommitted writes in memory are refused with a sentence that says so, and are not committed."""

    @memory.app.before_request
    def audit_request() -> None:
        memory.db.session.add(memory.Charge(amount=0))
        memory.db.session.flush()

    add(memory, lambda: "x")
    answer = send(memory, new_key())
    assert (503, True) == (answer.status_code, "audit_request" in answer.json["detail"])
    assert "ncommitted" in answer.json["detail"]
    assert 0 == memory.charges() == len(memory.rows())


# The database goes away, and comes back


@pytest.mark.scenario(59)
def test_recording_while_the_table_is_gone(make: Callable[..., Shop]) -> None:
    """An answer that can't be recorded reaches the client; the process keeps the record, and writes it later."""
    shop = make(lock_timeout=0.6)
    gone, back = "ALTER TABLE {} RENAME TO {}", ("idempotency_keys", "elsewhere")

    def view() -> tuple[str, int]:
        shop.execute(sa.text(gone.format(*back)))
        return "charged", 201

    add(shop, view)
    key = new_key()
    with events(shop.app) as seen:
        first = send(shop, key)
        assert (201, "charged") == (first.status_code, first.text)
        assert ["record_failed"] == [name for name, _ in seen]
        assert_replayed(send(shop, key), first)
        shop.execute(sa.text(gone.format(*reversed(back))))
        until(lambda: "executed" in [name for name, _ in seen])
    assert [(key, "completed")] == [(row["key"], row["status"]) for row in shop.rows()]
    assert_replayed(send(shop, key), first)
