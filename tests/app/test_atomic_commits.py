"""Atomic mode where the database undoes the work: conflicts and runs again, lost connections, a writer that is busy."""

from __future__ import annotations

import io
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, after_this_request, g, request, stream_with_context
from sqlalchemy.exc import OperationalError
from werkzeug.test import TestResponse

from tests.support.apps import Shop, assert_replayed, close, events, guard, make_shop, new_key, send, until
from tests.support.barrier import background
from tests.support.proxy import CuttingProxy

pytestmark = pytest.mark.one_driver

#: A trigger that undoes, as concurrency does, as many transactions as it is told to: sequences outlive rollbacks.
TRIGGER = """
CREATE SEQUENCE tries;
CREATE FUNCTION undo() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('tries') <= {times} THEN
        RAISE EXCEPTION 'could not serialize' USING ERRCODE = '{state}';
    END IF;
    RETURN NEW;
END $$;
CREATE {constraint} TRIGGER undoing {when} INSERT ON {table} {deferred} FOR EACH ROW EXECUTE FUNCTION undo()
"""
PLACES = {
    "view": {"constraint": "", "when": "BEFORE", "table": "charge", "deferred": ""},
    "record": {"constraint": "", "when": "BEFORE", "table": "idempotency_keys", "deferred": ""},
    "commit": {
        "constraint": "CONSTRAINT",
        "when": "AFTER",
        "table": "charge",
        "deferred": "DEFERRABLE INITIALLY DEFERRED",
    },
}
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


def undo(shop: Shop, place: str, times: int, state: str = "40001") -> None:
    """Let the database undo the next transactions: in the view's insert, the record's, or at the commit."""
    shop.execute(sa.text(TRIGGER.format(times=times, state=state, **PLACES[place])))


@pytest.fixture(params=["postgres_url", "psycopg_url"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Shop]]:
    """A function that makes shops in atomic mode on a fresh PostgreSQL database, once for each driver."""
    shops: list[Shop] = []

    def build(**config: Any) -> Shop:
        shops.append(make_shop(request.getfixturevalue(request.param), **{"atomic": True, **config}))
        return shops[-1]

    yield build
    for shop in shops:
        close(shop.app)


@pytest.fixture
def make_one(psycopg_url: str) -> Iterator[Callable[..., Shop]]:
    """As ``make``, with one driver: for behaviour in which that has no part."""
    shops: list[Shop] = []

    def build(**config: Any) -> Shop:
        shops.append(make_shop(psycopg_url, atomic=True, **config))
        return shops[-1]

    yield build
    for shop in shops:
        close(shop.app)


def refused(answer: TestResponse) -> bool:
    """Whether an answer is the 503 that asks for the same request once more."""
    kind = (answer.json or {}).get("type", "").rpartition(":")[2]
    return (503, "store-unavailable", True) == (answer.status_code, kind, "Retry-After" in answer.headers)


# Serialization failures


@pytest.mark.parametrize("testing", [False, True])
@pytest.mark.parametrize("state", ["40001", "40P01"])
@pytest.mark.parametrize("place", PLACES)
def test_a_conflict(make: Callable[..., Shop], place: str, state: str, testing: bool) -> None:
    """What the database undoes because of concurrency is a 503 that asks for another try, and leaves nothing."""
    shop = make()
    shop.app.testing = testing
    undo(shop, place, 1, state)
    key = new_key()
    with events(shop.app) as seen:
        assert refused(shop.charge(key))
    assert (0, []) == (shop.charges(), shop.rows())
    assert 1 == [name for name, _ in seen].count("released")
    first = shop.charge(key)
    assert (201, 1, 1) == (first.status_code, shop.charges(), len(shop.rows()))
    assert_replayed(shop.charge(key), first)


@pytest.mark.parametrize("place", PLACES)
def test_a_conflict_quotes_no_values(
    make_one: Callable[..., Shop], caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """The log says why the database undid the work, without the values that a statement had."""
    shop = make_one()
    undo(shop, place, 1)
    assert refused(shop.charge(new_key(), amount=471_147_114))
    assert "could not serialize" in caplog.text
    assert "471147114" not in caplog.text


@pytest.mark.parametrize("how", ["between", "before"])
@pytest.mark.parametrize("retries", [0, 1])
def test_write_skew(make: Callable[..., Shop], how: str, retries: int) -> None:
    """Two serializable transactions that read what the other writes: the atomic one is undone, and may run again."""
    shop, runs = make(engine_options={"isolation_level": "SERIALIZABLE"}, atomic_retries=retries), []
    count = sa.select(sa.func.count()).select_from(shop.Charge.__table__)

    def other() -> None:
        with shop.db.engine.begin() as connection:
            assert 0 == connection.scalar(count)
            connection.execute(sa.insert(shop.Charge.__table__).values(amount=1))

    def view() -> tuple[str, int]:
        found = shop.db.session.scalar(count)
        runs.append(found)
        if how == "before" and len(runs) == 1:
            other()
        shop.db.session.add(shop.Charge(amount=2 if found == 0 else 3))
        shop.db.session.commit()
        if how == "between" and len(runs) == 1:
            other()
        return "x", 201

    guard(shop, view)
    key = new_key()
    answer = send(shop, key)
    if not retries:
        assert refused(answer)
        assert (1, []) == (shop.charges(), shop.rows())
        answer = send(shop, key)
    assert ("x", 201, [0, 1]) == (answer.text, answer.status_code, runs)
    assert [(1,), (3,)] == sorted(shop.execute(sa.select(shop.Charge.__table__.c.amount)))
    assert_replayed(send(shop, key), answer)


@pytest.mark.parametrize("place", PLACES)
def test_the_whole_view_runs_again(make: Callable[..., Shop], place: str) -> None:
    """With ``atomic_retries`` an undone view runs again; what it asked to be done for its answer is done once."""
    shop, told, hooks = make(atomic_retries=3), [], []
    undo(shop, place, 2)

    @shop.app.after_request
    def hook(response: Response) -> Response:
        hooks.append(response.status_code)
        return response

    def view() -> tuple[str, int]:
        shop.runs.append(shop.idempotency.current.attempts)  # type: ignore[union-attr]
        number = len(shop.runs)
        after_this_request(lambda response: (response.headers.add("X-Run", str(number)), response)[1])
        shop.idempotency.after_commit(lambda: told.append((number, shop.charges())))
        shop.db.session.add(shop.Charge(amount=number))
        shop.db.session.commit()
        return f"run {number}", 201

    guard(shop, view)
    key = new_key()
    with events(shop.app) as seen:
        first = send(shop, key)
    assert ("run 3", 201, ["3"]) == (first.text, first.status_code, first.headers.getlist("X-Run"))
    assert ([0, 0, 0], [(3, 1)], {201}) == (shop.runs, told, set(hooks))
    assert [(3,)] == shop.execute(sa.select(shop.Charge.__table__.c.amount))
    assert ["released", "released", "executed"] == [name for name, _ in seen]
    retry = send(shop, key)
    assert_replayed(retry, first)
    assert ["3"] == retry.headers.getlist("X-Run")


@pytest.mark.parametrize("place", PLACES)
def test_runs_that_are_used_up(make_one: Callable[..., Shop], place: str) -> None:
    """A view that is undone once more than it may run again is a 503, and nothing of any run is left."""
    shop, told = make_one(atomic_retries=2), []
    undo(shop, place, 3)

    def view() -> tuple[str, int]:
        shop.runs.append("x")
        shop.idempotency.after_commit(lambda: told.append("x"))
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        return "x", 201

    guard(shop, view)
    key = new_key()
    assert refused(send(shop, key))
    assert (3, [], 0, []) == (len(shop.runs), told, shop.charges(), shop.rows())
    assert 201 == send(shop, key).status_code
    assert (["x"], 1) == (told, shop.charges())


BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "json": lambda: {"json": {"amount": 7}},
    "form": lambda: {"data": {"amount": "7"}},
    "stream": lambda: {"data": b"7" * 9, "content_type": "text/plain"},
    "large": lambda: {"data": b"7" * 10**6, "content_type": "text/plain"},
    "upload": lambda: {"data": {"amount": "7", "file": (io.BytesIO(b"content"), "one.txt")}},
}


@pytest.mark.parametrize("place", ["view", "commit"])
@pytest.mark.parametrize("kind", BODIES)
def test_the_body_is_there_again(make_one: Callable[..., Shop], kind: str, place: str) -> None:
    """A view that runs again reads its body as the first time: JSON, form, stream and upload."""
    shop = make_one(atomic_retries=1)
    undo(shop, place, 1)

    def read() -> Any:
        if kind == "json":
            return request.get_json()
        if kind in ("stream", "large"):
            return request.stream.read()
        return request.form.to_dict(), {name: file.read() for name, file in request.files.items()}

    def view() -> tuple[str, int]:
        shop.runs.append(read())
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        return "x", 201

    guard(shop, view)
    key = new_key()
    assert 201 == send(shop, key, **BODIES[kind]()).status_code
    assert 2 == len(shop.runs)
    assert shop.runs[0] == shop.runs[1]
    assert len(str(shop.runs[0])) > 5
    assert "true" == send(shop, key, **BODIES[kind]()).headers["Idempotent-Replay"]


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("reads", ["data", "form", "json"])
def test_a_body_that_a_hook_has_read(make_one: Callable[..., Shop], reads: str, kind: str) -> None:
    """What hooks have read of a body makes no difference to the second run."""
    shop = make_one(atomic_retries=1)
    undo(shop, "commit", 1)

    @shop.app.before_request
    def hook() -> None:
        {
            "data": request.get_data,
            "form": lambda: request.form,
            "json": lambda: request.get_json(silent=True),
        }[reads]()

    def view() -> tuple[str, int]:
        shop.runs.append(
            (
                request.get_data(parse_form_data=True),
                request.form.to_dict(),
                {name: file.read() for name, file in request.files.items()},
                request.get_json(silent=True),
            )
        )
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        return "x", 201

    guard(shop, view)
    key = new_key()
    assert 201 == send(shop, key, **BODIES[kind]()).status_code
    assert 2 == len(shop.runs)
    assert shop.runs[0] == shop.runs[1]
    assert "true" == send(shop, key, **BODIES[kind]()).headers["Idempotent-Replay"]


def test_a_view_that_changes_what_it_parsed(make_one: Callable[..., Shop]) -> None:
    """A view that takes its JSON apart finds it whole when it runs again."""
    shop = make_one(atomic_retries=1)
    undo(shop, "view", 1)

    def view() -> tuple[str, int]:
        shop.runs.append(request.get_json().pop("amount"))
        shop.db.session.add(shop.Charge(amount=shop.runs[-1]))
        shop.db.session.commit()
        return "x", 201

    guard(shop, view)
    assert (201, [7, 7]) == (send(shop, new_key(), json={"amount": 7}).status_code, shop.runs)


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_that_is_not_fingerprinted(make_one: Callable[..., Shop], kind: str) -> None:
    """Where something else stands for the body, it is there again all the same."""
    shop = make_one(atomic_retries=1, fingerprint=lambda asked: asked.headers["X-Tenant"])
    undo(shop, "commit", 1)

    def view() -> tuple[str, int]:
        shop.runs.append(request.stream.read())
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        return "x", 201

    guard(shop, view)
    assert 201 == send(shop, new_key(), **BODIES[kind]()).status_code
    assert 2 == len(shop.runs)
    assert shop.runs[0] == shop.runs[1] != b""


def test_a_second_run_that_fails(make_one: Callable[..., Shop]) -> None:
    """The second run's outcome is the request's, whatever that is; the first run's is forgotten."""
    shop = make_one(atomic_retries=1)
    undo(shop, "commit", 1)

    def view() -> tuple[str, int]:
        shop.runs.append("x")
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        if len(shop.runs) == 2:
            raise ZeroDivisionError
        return "x", 201

    guard(shop, view)
    key = new_key()
    assert (500, 0, []) == (send(shop, key).status_code, shop.charges(), shop.rows())
    assert (201, 3) == (send(shop, key).status_code, len(shop.runs))


def test_loaded_objects_in_a_second_run(make_one: Callable[..., Shop]) -> None:
    """Objects that a hook loaded are attached in the second run too, as the database has them."""
    shop = make_one(atomic_retries=1)
    with shop.app.app_context():
        shop.db.session.add(shop.Charge(amount=5))
        shop.db.session.commit()
    undo(shop, "commit", 1)

    @shop.app.before_request
    def load() -> None:
        g.account = shop.db.session.get(shop.Charge, 1)

    def view() -> tuple[str, int]:
        g.account.amount += 1
        shop.db.session.add(shop.Charge(amount=0))
        shop.db.session.commit()
        return str(g.account.amount), 201

    guard(shop, view)
    assert ("6", 201) == ((answer := send(shop, new_key())).text, answer.status_code)
    assert [(0,), (6,)] == sorted(shop.execute(sa.select(shop.Charge.__table__.c.amount)))


def conflicting(shop: Shop, where: str) -> Callable[[], Any]:
    """A view whose insert is made, or left to the extension, in this place."""

    def work() -> None:
        shop.db.session.add(shop.Charge(amount=len(shop.runs)))
        if where != "left":
            shop.db.session.commit()

    def view() -> Any:
        shop.runs.append("run")
        if where == "stream":
            return Response(stream_with_context(work() or one for one in "ab"), 201)
        if where == "left":
            work()
        return "ab", 201

    if where == "hook":

        @shop.app.after_request
        def hook(response: Response) -> Response:
            if response.status_code == 201:
                work()
            return response

    return view


@pytest.mark.parametrize("where", ["left", "stream", "hook"])
@pytest.mark.parametrize("retries", [0, 1])
def test_a_conflict_after_the_view(make: Callable[..., Shop], where: str, retries: int) -> None:
    """Undone in the extension's own flush, in a stream or in a hook, the view runs again; else it is a 503."""
    shop = make(atomic_retries=retries)
    undo(shop, "view", 1)
    guard(shop, conflicting(shop, where))
    key = new_key()
    with events(shop.app) as seen:
        answer = send(shop, key)
    if not retries:
        assert refused(answer)
        assert (0, [], 1) == (shop.charges(), shop.rows(), len(shop.runs))
        answer = send(shop, key)
    else:
        assert ["released", "executed"] == [name for name, _ in seen]
    assert ("ab", 201, 2) == (answer.text, answer.status_code, len(shop.runs))
    inserted = [2, 2] if where == "stream" else [2]
    assert inserted == [row[0] for row in shop.execute(sa.select(shop.Charge.__table__.c.amount))]
    assert_replayed(send(shop, key), answer)
    assert 2 == len(shop.runs)


def test_a_stale_read_that_is_left_to_the_extension(make: Callable[..., Shop]) -> None:
    """A row that somebody else changed after the view had read it: the view runs again on what is there by now."""
    shop = make(engine_options={"isolation_level": "REPEATABLE READ"}, atomic_retries=1)
    shop.execute(sa.insert(shop.Charge.__table__).values(id=1, amount=1))

    def view() -> tuple[str, int]:
        shop.runs.append("run")
        charge = shop.db.session.get(shop.Charge, 1)
        if len(shop.runs) == 1:
            shop.execute(sa.update(shop.Charge.__table__).values(amount=11))
        charge.amount += 1
        return "x", 201

    guard(shop, view)
    assert (201, 2) == (send(shop, new_key()).status_code, len(shop.runs))
    assert [(12,)] == shop.execute(sa.select(shop.Charge.__table__.c.amount))


def test_a_coroutine_runs_again(make_one: Callable[..., Shop]) -> None:
    """A coroutine's view runs again as a function's does."""
    shop = make_one(atomic_retries=2)
    undo(shop, "view", 1)

    async def view() -> tuple[str, int]:
        shop.runs.append("x")
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        return "x", 201

    guard(shop, view)
    assert (201, 2, 1) == (send(shop, new_key()).status_code, len(shop.runs), shop.charges())


def test_a_conflict_that_the_view_handles(make: Callable[..., Shop]) -> None:
    """A view that catches the failure and goes back to its savepoint decides for itself."""
    shop = make(atomic_retries=2)
    undo(shop, "view", 1)

    def view() -> tuple[str, int]:
        shop.runs.append("x")
        try:
            shop.db.session.add(shop.Charge(amount=1))
            shop.db.session.commit()
        except OperationalError:
            shop.db.session.rollback()
            shop.db.session.add(shop.Charge(amount=2))
            shop.db.session.commit()
        return "x", 201

    guard(shop, view)
    assert (201, 1) == (send(shop, new_key()).status_code, len(shop.runs))
    assert [(2,)] == shop.execute(sa.select(shop.Charge.__table__.c.amount))


# The connection is lost


@pytest.fixture
def behind(tcp_url: str) -> Iterator[Shop]:
    """A shop in atomic mode behind the cutting proxy, once for each driver."""
    shop = make_shop(tcp_url, atomic=True)
    yield shop
    close(shop.app)


@pytest.mark.scenario(75)
def test_the_reply_to_the_commit_is_lost(behind: Shop, cutting_proxy: CuttingProxy) -> None:
    """A commit that was carried out, though its reply was lost, is found out by the own token: the answer stands."""
    told: list[str] = []

    def view() -> tuple[str, int]:
        behind.idempotency.after_commit(lambda: told.append("x"))
        behind.db.session.add(behind.Charge(amount=1))
        return "x", 201

    guard(behind, view)
    rule = cutting_proxy.lose_reply("COMMIT")
    key = new_key()
    with behind.app.app_context():
        first = send(behind, key)
        # A test's context outlives the request, and so does its session, which is the app's alone again.
        assert "get_bind" not in vars(behind.db.session())
    assert (True, 201, ["x"]) == (rule.happened, first.status_code, told)
    assert (1, 1) == (behind.charges(), len(behind.rows()))
    assert_replayed(send(behind, key), first)


@pytest.mark.scenario(75)
def test_the_commit_is_lost(behind: Shop, cutting_proxy: CuttingProxy) -> None:
    """A commit that never arrived is a 503, and leaves nothing; the retry does it."""
    told: list[str] = []

    def view() -> tuple[str, int]:
        behind.idempotency.after_commit(lambda: told.append("x"))
        behind.db.session.add(behind.Charge(amount=1))
        return "x", 201

    guard(behind, view)
    rule = cutting_proxy.lose_request("COMMIT")
    key = new_key()
    assert refused(send(behind, key))
    assert (True, [], 0, []) == (rule.happened, told, behind.charges(), behind.rows())
    assert 201 == send(behind, key).status_code
    assert (["x"], 1) == (told, behind.charges())


def test_nobody_can_tell_what_became_of_the_commit(behind: Shop, cutting_proxy: CuttingProxy) -> None:
    """A database that goes away with the commit's reply leaves a 503 that says so; the retry gets what was done."""
    told: list[str] = []

    def view() -> tuple[str, int]:
        behind.idempotency.after_commit(lambda: told.append("x"))
        behind.db.session.add(behind.Charge(amount=1))
        return "x", 201

    guard(behind, view)
    key = new_key()
    reply = cutting_proxy.lose_reply("COMMIT")
    looks = cutting_proxy.lose_request("idempotency_keys", times=10)
    looks.left = 0

    def lose(connection: Any) -> None:
        looks.left = 10

    with behind.app.app_context():
        sa.event.listen(behind.db.engine, "commit", lose)
    answer = send(behind, key)
    looks.left = 0
    assert (True, True, True) == (reply.happened, looks.happened, refused(answer))
    assert "could not be learned" in answer.json["detail"]
    retry = send(behind, key)
    assert (201, "true", 1, []) == (retry.status_code, retry.headers["Idempotent-Replay"], behind.charges(), told)


@pytest.mark.parametrize("when", ["view", "record"])
def test_the_database_goes_away(behind: Shop, cutting_proxy: CuttingProxy, when: str) -> None:
    """A connection that is cut in the middle is a 5xx that leaves nothing; the next request is served as ever."""
    runs: list[str] = []

    def view() -> tuple[str, int]:
        runs.append("x")
        behind.db.session.add(behind.Charge(amount=1))
        behind.db.session.commit()
        if len(runs) == 1:
            cutting_proxy.cut()
            if when == "view":
                behind.db.session.add(behind.Charge(amount=2))
                behind.db.session.commit()
        return "x", 201

    guard(behind, view)
    key = new_key()
    assert send(behind, key).status_code in (500, 503)
    assert (0, []) == (behind.charges(), behind.rows())
    answers: list[Any] = []
    # The key is locked for as long as the server has not noticed that the connection is gone.
    until(lambda: answers.append(send(behind, key)) or answers[-1].status_code != 409)
    first = answers[-1]
    assert (201, 1) == (first.status_code, behind.charges())
    assert_replayed(send(behind, key), first)


@pytest.mark.scenario(59)
def test_a_database_that_is_gone(behind: Shop, cutting_proxy: CuttingProxy) -> None:
    """Without a database the view does not run: 503, and 201 once it is back."""
    with cutting_proxy.gone():
        assert refused(behind.charge(new_key()))
    assert [] == behind.runs
    assert 201 == behind.charge(new_key()).status_code


@pytest.mark.scenario(59)
def test_a_database_that_was_never_there(behind: Shop, cutting_proxy: CuttingProxy) -> None:
    """So it is where the app's pool has no connection to give."""
    with behind.app.app_context():
        behind.db.engine.dispose()
    with cutting_proxy.gone():
        assert refused(behind.charge(new_key()))
    assert [] == behind.runs
    assert 201 == behind.charge(new_key()).status_code


def test_an_app_whose_pool_is_used_up(postgres_url: str) -> None:
    """A connection that the app's own pool does not give in time is a 503 that asks for another try."""
    shop = make_shop(postgres_url, atomic=True, engine_options={"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1})
    with shop.app.app_context(), shop.db.engine.connect():
        assert refused(shop.charge(new_key()))
    assert [] == shop.runs
    assert 201 == shop.charge(new_key()).status_code
    close(shop.app)


# SQLite's one writer


@pytest.fixture
def impatient(sqlite_url: str) -> Iterator[Shop]:
    """A shop on a SQLite file, in atomic mode, that waits for the writer for a tenth of a second."""
    shop = make_shop(sqlite_url, atomic=True, engine_options={"connect_args": {"timeout": 0.1}})
    yield shop
    close(shop.app)


@pytest.mark.scenario(20)
def test_a_writer_that_somebody_else_has(impatient: Shop, sqlite_url: str) -> None:
    """A writer that stays taken for longer than the busy timeout is a 503, the view not run."""
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        assert refused(impatient.charge(new_key()))
        other.execute("ROLLBACK")
    other.close()
    assert [] == impatient.runs
    assert 201 == impatient.charge(new_key()).status_code


def test_readers_that_keep_the_commit_off(impatient: Shop, sqlite_url: str) -> None:
    """Readers that SQLite has to wait for at the commit, for too long, are a 503 that leaves nothing."""
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM charge").fetchall()
        assert refused(impatient.charge(new_key()))
        other.execute("ROLLBACK")
    other.close()
    assert (0, []) == (impatient.charges(), impatient.rows())
    assert (201, 1) == (impatient.charge(new_key()).status_code, impatient.charges())


def test_a_replay_waits_for_no_writer(make_light: Callable[..., Shop]) -> None:
    """On SQLite, while one atomic view has the writer, a key that has its answer is replayed."""
    shop = make_light(atomic=True)
    inside, done = threading.Event(), threading.Event()
    guard(shop, lambda: "quick")
    guard(shop, lambda: (inside.set(), done.wait(10), "slow")[-1], "/slow")
    key = new_key()
    first = send(shop, key)
    slow = background(lambda: send(shop, new_key(), "/slow", client=shop.app.test_client()))
    assert inside.wait(10)
    try:
        assert_replayed(send(shop, key), first)
    finally:
        done.set()
    assert "slow" == slow.result(10).text
