"""Atomic mode's side of the store: one transaction of the app's, the key's record in it."""

from __future__ import annotations

import dataclasses
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from flask_idempotency.claim import Asking, Claim, Status, Stored
from flask_idempotency.errors import CommitUnknown, ConfigurationError, StoreError, Undone, WriterHeld
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore, atomic, atomic_postgresql, inside_sqlite, message
from flask_idempotency.store.inside import Inside
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import BACK_ENDS, app_engine, count, execute, opened, row, shift
from tests.support.barrier import background, together
from tests.support.postgres import PgBouncer
from tests.support.proxy import CuttingProxy

THREADS = 8
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
ATOMIC = [name for name, back_end in BACK_ENDS.items() if not back_end.portable and name != "mariadb"]


@contextmanager
def operation(store: SQLAlchemyStore) -> Iterator[Inside]:
    """An operation that has begun, on a connection of the app's; rolled back at the end, unless it was committed."""
    with store.connect() as connection:
        one = store.inside(connection)
        try:
            one.begin()
            yield one
        finally:
            one.rollback()


def charge(one: Inside, key: str = "key-00000001") -> None:
    """The app's work: one row."""
    one._connection.execute(sa.text("INSERT INTO charge (key) VALUES (:key)"), {"key": key})


def run(store: SQLAlchemyStore, asking: Asking, recorded: Recorded = ANSWER) -> bool:
    """One whole operation; whether it got the claim. Nothing else must go wrong."""
    with operation(store) as one:
        found = one.enter(asking)
        if not isinstance(found, Claim):
            return False
        charge(one, asking.key)
        assert one.finish(found, asking, recorded, 3600)
        return True


def charges(store: SQLAlchemyStore) -> list[str]:
    """The keys whose work is there."""
    return [key for (key,) in execute(store, "SELECT key FROM charge ORDER BY key")]


def make_charges(store: SQLAlchemyStore) -> None:
    """The app's table. The store is ready before the app uses its engine, as in every app."""
    store.prepare()
    execute(store, "DROP TABLE IF EXISTS charge")
    execute(store, "CREATE TABLE charge (key VARCHAR(255))")


@pytest.fixture(params=ATOMIC)
def store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """An empty store where atomic mode works, and the app's table: once for each database and driver."""
    back_end = BACK_ENDS[request.param]
    url = request.getfixturevalue(back_end.url)
    with opened(url, memory=back_end.memory) as store:
        make_charges(store)
        yield store


@pytest.fixture(params=["shared_psycopg2_url", "shared_psycopg_url"])
def postgres_store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """The same on PostgreSQL, once for each driver."""
    with opened(request.getfixturevalue(request.param)) as store:
        make_charges(store)
        yield store


@pytest.fixture(params=["sqlite_url", "memory_url"])
def sqlite_store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """The same on SQLite, in a file and in memory."""
    with opened(request.getfixturevalue(request.param), memory=request.param == "memory_url") as store:
        make_charges(store)
        yield store


# The way through


def test_a_first_run_and_its_replay(store: SQLAlchemyStore) -> None:
    """A first run gets the claim, and from its commit on everybody finds the record, in atomic mode and out of it."""
    asking = ask()
    assert run(store, asking)
    with operation(store) as one:
        inner = one.enter(ask())
    for found in (inner, store.claim(ask()), store.find(asking.scope, asking.key)):
        assert isinstance(found, Stored)
        assert (ANSWER, Status.COMPLETED, asking.token) == (found.recorded, found.status, found.token)
        assert (1, False, False) == (found.attempts, found.stale, found.expired)
        assert found.age_seconds < 30
    assert ["key-00000001"] == charges(store)


def test_the_row_is_complete(store: SQLAlchemyStore) -> None:
    """The row that is written at the end is as the default mode would have left it."""
    usual = ask(key="usual-key", stale_policy="reject", lock_timeout=7)
    assert store.record(claimed(store, usual), ANSWER, 3600)
    asking = dataclasses.replace(usual, key="atomic-key")
    assert run(store, asking)
    kept, expected = row(store, "atomic-key")._asdict(), row(store, "usual-key")._asdict()
    times = [name for name in kept if isinstance(kept[name], type(kept["created_at"]))]
    assert {"created_at", "updated_at", "locked_at", "completed_at", "expires_at"} == set(times)
    for name in times:
        assert abs((kept[name] - expected[name]).total_seconds()) < 30
    assert abs((kept["expires_at"] - kept["completed_at"]).total_seconds() - 3600) < 1
    for name in ("id", "key", *times):
        del kept[name], expected[name]
    assert expected == kept


def test_nothing_shows_before_the_commit(store: SQLAlchemyStore) -> None:
    """Until the commit nobody sees the claim, the work or the record."""
    if not store.separate:
        pytest.skip("one connection for everybody")
    asking = ask()
    with operation(store) as one:
        claim = one.enter(asking)
        assert isinstance(claim, Claim)
        charge(one)
        assert one.record(claim, asking, ANSWER, 3600)
        assert store.find(asking.scope, asking.key) is None
        assert ([], 0) == (charges(store), count(store))
        one.commit()
    assert (["key-00000001"], 1) == (charges(store), count(store))


# Many at once


class Race:
    """Threads that ask for the same keys until they find each key's record, as clients do that retry."""

    def __init__(self, store: SQLAlchemyStore, keys: int) -> None:
        self.store = store
        self.keys = [f"key-{number}" for number in range(keys)]
        self.ran: Counter[str] = Counter()  # committed, as far as the clients know
        self.granted: Counter[str] = Counter()
        self.late: list[str] = []  # granted although it had been committed
        self.committed: set[str] = set()
        self.none = 0
        self.lock = threading.Lock()

    def go(self, threads: int = THREADS) -> Race:
        together(threads, self._client, timeout=50)
        return self

    def _client(self, number: int) -> None:
        for key in self.keys:
            while not self._once(ask(key=key)):
                pass

    def _once(self, asking: Asking) -> bool:
        known = asking.key in self.committed
        with operation(self.store) as one:
            found = one.enter(asking)
            if isinstance(found, Claim):
                with self.lock:
                    self.granted[asking.key] += 1
                    if known:
                        self.late.append(asking.key)
                charge(one, asking.key)
                assert one.record(found, asking, ANSWER, 3600)
                one.commit()
                with self.lock:
                    self.ran[asking.key] += 1
                    self.committed.add(asking.key)
                return True
        if found is None:
            self.none += 1
            found = self.store.find(asking.scope, asking.key)
        return found is not None

    def assert_once(self) -> None:
        """Each key's view ran once, and nobody began another run."""
        once = dict.fromkeys(self.keys, 1)
        assert once == self.ran
        assert once == Counter(charges(self.store))
        assert [] == self.late
        assert len(self.keys) == count(self.store)


@pytest.mark.scenario(1, 13)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("url", ["shared_psycopg2_url", "shared_psycopg_url"])
def test_no_view_runs_twice(request: pytest.FixtureRequest, level: str, url: str) -> None:
    """At every isolation level of the app's engine exactly one of many callers runs, and none after its commit."""
    with opened(request.getfixturevalue(url), isolation_level=level, pool_size=THREADS) as store:
        make_charges(store)
        race = Race(store, 120).go()
        race.assert_once()
        assert race.none > 0
        # Nothing of an answer that was rolled back has begun either.
        assert dict.fromkeys(race.keys, 1) == race.granted


@pytest.mark.scenario(13)
def test_no_view_runs_twice_on_sqlite(sqlite_store: SQLAlchemyStore) -> None:
    """On SQLite exactly one of many callers runs, in a file and on the one connection of a database in memory."""
    race = Race(sqlite_store, 40).go(4)
    race.assert_once()
    assert dict.fromkeys(race.keys, 1) == race.granted


def test_no_view_runs_twice_with_another_driver(
    postgres_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver of which it is not known whether it sends two statements at once, they are sent one by one."""
    monkeypatch.setattr(message, "_DRIVERS", ())
    monkeypatch.setattr(message.Message, "send", None)
    Race(postgres_store, 60).go().assert_once()


def waits_for_lock(store: SQLAlchemyStore) -> bool:
    """Whether somebody waits for an advisory lock."""
    return bool(execute(store, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))


def test_the_look_is_younger_than_the_lock(postgres_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the one message the look-up has a snapshot of its own: it sees what was committed while the lock was got."""
    asking = ask()
    with operation(postgres_store) as one:
        claim = one.enter(asking)
        assert isinstance(claim, Claim)
        # As if the other one's commit came just after this statement's snapshot and just before its lock.
        opening = postgres_store._atomic._opening  # type: ignore[union-attr]
        tried = re.compile(r"pg_try_advisory_xact_lock\((CAST\(%\(lock\)s\S* AS BIGINT\))\) AS")
        text, replaced = tried.subn(r"(SELECT true FROM pg_advisory_xact_lock(\1)) AS", opening._text)
        assert 1 == replaced
        monkeypatch.setattr(opening, "_text", text)

        def second() -> Any:
            with operation(postgres_store) as two:
                return two.enter(ask())

        found = background(second)
        while not waits_for_lock(postgres_store):
            assert not found.done()
        assert one.record(claim, asking, ANSWER, 3600)
        one.commit()
    second_found = found.result(10)
    assert isinstance(second_found, Stored)
    assert asking.token == second_found.token


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("url", ["shared_psycopg2_url", "shared_psycopg_url"])
def test_a_duplicate_in_flight_waits_for_no_lock(request: pytest.FixtureRequest, level: str, url: str) -> None:
    """A duplicate of what is in flight learns at once that somebody is at it, and finds nothing stored."""
    with opened(request.getfixturevalue(url), isolation_level=level) as store:
        make_charges(store)
        with operation(store) as one:
            assert isinstance(one.enter(ask()), Claim)
            # The second time the isolation level is known.
            for _ in range(2):
                with operation(store) as two:
                    two._connection.execute(sa.text("SET LOCAL lock_timeout = 20"))
                    assert two.enter(ask()) is None
                    two._connection.execute(sa.text("SELECT 1"))
            assert store.find("tenant-1", "key-00000001") is None
        assert run(store, ask())


def test_a_killed_client_leaves_nothing(postgres_store: SQLAlchemyStore) -> None:
    """When a client goes in the middle, its work, its record and its lock go with it."""
    asking = ask()
    with operation(postgres_store) as one:
        claim = one.enter(asking)
        assert isinstance(claim, Claim)
        charge(one, "lost")
        assert one.record(claim, asking, ANSWER, 3600)
        one._driver.close()
    # The server notices it in its own time.
    while not run(postgres_store, ask()):
        pass
    assert ["key-00000001"] == charges(postgres_store)


@pytest.mark.scenario(13)
def test_behind_a_transaction_pool(pgbouncer: PgBouncer, postgres_database: str, driver: str) -> None:
    """Behind PgBouncer in transaction mode all works over two server connections, and a killed client locks nothing."""
    # The app's own statements must not be prepared there either: psycopg 3 would, the sixth time.
    unprepared = {"prepare_threshold": None} if driver == "psycopg" else {}
    url = pgbouncer.url(postgres_database, driver)
    with opened(url, pool_size=THREADS, connect_args=unprepared) as store:
        make_charges(store)
        with operation(store) as one:
            assert isinstance(one.enter(ask(key="key-3")), Claim)
            one._driver.close()
        Race(store, 50).go(4).assert_once()


def test_a_collision_of_hashes(postgres_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two keys whose hashes collide the second in flight is turned away; neither gets the other's answer."""
    monkeypatch.setattr(atomic_postgresql, "lock_number", lambda scope, key: -(2**63))
    first, second = ask(key="first-key"), ask(key="second-key")
    with operation(postgres_store) as one:
        claim = one.enter(first)
        assert isinstance(claim, Claim)
        with operation(postgres_store) as two:
            assert two.enter(second) is None
        assert one.record(claim, first, ANSWER, 3600)
        one.commit()
    assert run(postgres_store, second, Recorded(202, (), b"second"))
    for asking, status in ((first, 201), (second, 202)):
        with operation(postgres_store) as one:
            found = one.enter(dataclasses.replace(asking, token="another"))
        assert isinstance(found, Stored)
        assert found.recorded is not None
        assert (asking.key, status) == (found.key, found.recorded.status)


def test_the_hash_of_a_key() -> None:
    """Scope and key are framed, so that no other pair gives the same lock, and the number fits PostgreSQL's."""
    pairs = [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", ""), ("A", "bc"), ("a", "b"), ("é", "\ud800")]
    numbers = {atomic_postgresql.lock_number(scope, key) for scope, key in pairs}
    assert len(pairs) == len(numbers)
    many = [atomic_postgresql.lock_number("scope", f"key-{number}") for number in range(100)]
    assert all(-(2**63) <= number < 2**63 for number in many)
    assert min(many) < 0 < max(many)


# Isolation levels and what was seen of them


@pytest.mark.parametrize("url", ["shared_psycopg2_url", "shared_psycopg_url"])
def test_the_isolation_level_changes(request: pytest.FixtureRequest, url: str) -> None:
    """What the last transaction showed of the isolation level is a hint; a wrong one costs a try, and nothing else."""
    with opened(request.getfixturevalue(url)) as store:
        make_charges(store)
        strict = app_engine(store).execution_options(isolation_level="SERIALIZABLE")
        usual, known = app_engine(store), []
        for number, engine in enumerate([strict, strict, usual, usual, strict]):
            with engine.connect() as connection:
                one, asking = store.inside(connection), ask(key=f"key-{number}")
                one.begin()
                claim = one.enter(asking)
                assert isinstance(claim, Claim)
                known.append((claim.id > 0, store._atomic._known.strict))  # type: ignore[union-attr]
                assert one.record(claim, asking, ANSWER, 3600)
                one.commit()
            # What is there is found by either, with or without the hint.
            with engine.connect() as connection:
                two = store.inside(connection)
                two.begin()
                assert isinstance(two.enter(ask(key=asking.key)), Stored)
                two.rollback()
        assert [(True, True), (True, True), (True, False), (False, False), (True, True)] == known
        assert 5 == count(store)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_snapshot_that_is_too_old(shared_psycopg2_url: str, level: str) -> None:
    """Where the transaction's snapshot is older than another one's commit, the unique index tells, not the look-up."""
    with opened(shared_psycopg2_url, isolation_level=level) as store:
        make_charges(store)
        for known in (False, True):
            asking = ask(key=f"key-{known}")
            with operation(store) as one:
                charge(one, "snapshot")
                with app_engine(store).execution_options(isolation_level="READ COMMITTED").connect() as connection:
                    two = store.inside(connection)
                    two.begin()
                    claim = two.enter(asking)
                    assert isinstance(claim, Claim)
                    assert two.record(claim, asking, ANSWER, 3600)
                    two.commit()
                store._atomic._known.strict = known  # type: ignore[union-attr]
                assert one.enter(ask(key=asking.key)) is None
        assert [] == charges(store)


@pytest.mark.parametrize("url", ["shared_psycopg2_url", "shared_psycopg_url"])
@pytest.mark.parametrize("early", [True, False])
def test_undone(request: pytest.FixtureRequest, url: str, early: bool) -> None:
    """A serialization failure, at the record or at the commit, says that all is undone; again, it succeeds."""
    with opened(request.getfixturevalue(url), isolation_level="SERIALIZABLE") as store:
        make_charges(store)
        with operation(store) as one, operation(store) as two:
            askings = ask(key="key-one"), ask(key="key-two")
            claims = []
            for operated, asking in zip((one, two), askings, strict=True):
                claims.append(operated.enter(asking))
                operated._connection.execute(sa.text("SELECT count(*) FROM charge")).all()
                charge(operated, asking.key)
            first, second = claims
            assert isinstance(first, Claim)
            assert isinstance(second, Claim)
            assert one.record(first, askings[0], ANSWER, 3600)
            if early:
                one.commit()
                with pytest.raises(Undone):
                    two.record(second, askings[1], ANSWER, 3600)
                two.rollback()
            else:
                assert two.record(second, askings[1], ANSWER, 3600)
                one.commit()
                with pytest.raises(Undone):
                    two.commit()
                assert not two._connection.in_transaction()
        assert ["key-one"] == charges(store)
        assert store.find("tenant-1", "key-two") is None
        assert run(store, askings[1])


def test_an_app_that_lives_in_autocommit(postgres_store: SQLAlchemyStore) -> None:
    """An engine in autocommit gets a transaction for the operation, and its autocommit back after it."""
    engine = app_engine(postgres_store).execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        one = postgres_store.inside(connection)
        one.begin()
        assert isinstance(one.enter(ask()), Claim)
        charge(one)
        assert [] == charges(postgres_store)
        one.rollback()
        driver = one._driver
    assert [] == charges(postgres_store)
    with engine.connect() as connection:
        assert driver is connection.connection.dbapi_connection
        assert driver.autocommit is True


# What is there already


@pytest.mark.parametrize("level", [None, *LEVELS[1:]])
@pytest.mark.parametrize("ended", ["expired", "stale", "released"])
def test_what_may_be_taken(request: pytest.FixtureRequest, ended: str, level: str | None) -> None:
    """What is past its retention, stale or released is taken within the transaction, and given back by a rollback."""
    urls = ["shared_psycopg2_url"] if level else ["shared_psycopg2_url", "shared_psycopg_url", "sqlite_url"]
    for url in urls:
        options: dict[str, Any] = {"isolation_level": level} if level else {}
        with opened(request.getfixturevalue(url), **options) as store:
            make_charges(store)
            first = ask()
            claim = claimed(store, first)
            if ended == "expired":
                assert store.record(claim, ANSWER, 3600)
            if ended == "released":
                assert store.keep_steps(claim, {"pay": "1"})
                assert store.release(claim)
            shift(store, 3601)
            asking, answer = ask(), Recorded(202, (), b"again")
            for commit in (False, True):
                with operation(store) as one:
                    # The second time the isolation level is known, and an insert comes first under the strict ones.
                    found = one.enter(asking)
                    assert isinstance(found, Stored)
                    assert (ended == "expired", first.token) == (found.expired, found.token)
                    taken = one.take(asking, found)
                    assert isinstance(taken, Claim)
                    assert ((1 if ended == "expired" else 2), asking.token) == (taken.attempts, taken.token)
                    charge(one)
                    assert one.record(taken, asking, answer, 3600)
                    if commit:
                        one.commit()
            now = store.find(asking.scope, asking.key)
            assert now is not None
            assert (answer, asking.token) == (now.recorded, now.token)
            assert ["key-00000001"] == charges(store)


def test_what_may_not_be_taken(store: SQLAlchemyStore) -> None:
    """A live claim is found and stays its holder's; so does one that changed after the look."""
    if not store.separate:
        pytest.skip("one connection for everybody")
    holder = claimed(store, ask())
    with operation(store) as one:
        found = one.enter(ask())
        assert isinstance(found, Stored)
        assert Status.IN_PROGRESS is found.status
        assert one.take(ask(), found) is None
    assert store.record(holder, ANSWER, 3600)
    shift(store, 3601)
    old = store.find("tenant-1", "key-00000001")
    assert old is not None
    assert old.expired
    assert store.take(ask(), old) is not None
    with operation(store) as one:
        assert one.take(ask(), old) is None


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_take_that_came_too_late_for_its_snapshot(shared_psycopg_url: str, level: str) -> None:
    """Whoever takes what has changed since its snapshot is told that somebody else was first, not of an error."""
    with opened(shared_psycopg_url, isolation_level=level) as store:
        make_charges(store)
        claimed(store, ask())
        shift(store, 60)
        old = store.find("tenant-1", "key-00000001")
        assert old is not None
        with operation(store) as one:
            charge(one)
            assert store.take(ask(), old) is not None
            assert one.take(ask(), old) is None


def test_the_other_mode_was_first(postgres_store: SQLAlchemyStore) -> None:
    """When the default mode has claimed the key in between, nothing is recorded, and its claim stays."""
    asking, other = ask(), ask()
    with operation(postgres_store) as one:
        claim = one.enter(asking)
        assert isinstance(claim, Claim)
        holder = claimed(postgres_store, other)
        assert not one.record(claim, asking, ANSWER, 3600)
    assert postgres_store.record(holder, ANSWER, 3600)


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_that_was_taken_from_it(shared_psycopg2_url: str, level: str) -> None:
    """A claim whose row is another's by now records nothing."""
    with opened(shared_psycopg2_url, isolation_level=level) as store:
        make_charges(store)
        asking = ask()
        with operation(store) as one:
            one.enter(asking)
            assert not one.record(Claim(12345, asking.scope, asking.key, asking.token, 30), asking, ANSWER, 3600)


@pytest.mark.parametrize(
    "answer",
    [
        Recorded(201, (("X-Odd", "a\x00b"),), b"body"),
        Recorded(201, (("X-Odd", "a\ud800b"),), b"body"),
        Recorded(201, (), b"body", "Odd\x00"),
    ],
)
@pytest.mark.parametrize("level", LEVELS[:2])
@pytest.mark.parametrize("url", ["shared_psycopg2_url", "shared_psycopg_url"])
def test_an_answer_that_the_database_can_not_hold(
    request: pytest.FixtureRequest, url: str, level: str, answer: Recorded
) -> None:
    """The work is committed all the same, and the key completed without an answer."""
    with opened(request.getfixturevalue(url), isolation_level=level) as store:
        make_charges(store)
        for _ in range(2):
            execute(store, "DELETE FROM {table}")
            assert run(store, ask(), answer)
            found = store.find("tenant-1", "key-00000001")
            assert found is not None
            assert Recorded(201) == found.recorded
        assert 2 == len(charges(store))


def test_what_only_the_driver_refuses(sqlite_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the driver refuses does not cost the work either."""
    monkeypatch.setattr(atomic.rows, "answer_parameters", refusing(atomic.rows.answer_parameters))
    assert run(sqlite_store, ask())
    found = sqlite_store.find("tenant-1", "key-00000001")
    assert found is not None
    assert Recorded(201) == found.recorded


def refusing(parameters: Callable[[Recorded], dict[str, Any]]) -> Callable[[Recorded], dict[str, Any]]:
    """A body comes with a status that no database can hold."""

    def parameters_of(recorded: Recorded) -> dict[str, Any]:
        values = parameters(recorded)
        return values if recorded.body is None else {**values, "kept_response_status": 2**70}

    return parameters_of


# Every way out


def state(store: SQLAlchemyStore) -> dict[str, Any]:
    """The settings of the driver's connection that an app may have made."""
    names = ("isolation_level", "autocommit", "cursor_factory", "prepare_threshold", "in_transaction")
    with store.connect() as connection:
        driver = connection.connection.dbapi_connection
        return {name: getattr(driver, name) for name in names if hasattr(driver, name)}


def test_nothing_is_left_of_a_rollback(store: SQLAlchemyStore) -> None:
    """A rollback at any point, or two, leaves no work, record or lock, and the driver's connection as it was."""
    before, asking = state(store), ask()
    for steps in range(4):
        with store.connect() as connection:
            one = store.inside(connection)
            one.rollback()
            if steps > 0:
                one.begin()
            if steps > 1:
                claim = one.enter(asking)
                assert isinstance(claim, Claim)
                with connection.begin_nested():
                    charge(one)
                connection.begin_nested()  # a savepoint that is still open
            if steps > 2:
                assert one.record(claim, asking, ANSWER, 3600)
            one.rollback()
            one.rollback()
            assert not connection.in_transaction()
            assert steps == 0 or not connection.closed or not store.separate
        one.rollback()
        assert (before, [], 0) == (state(store), charges(store), count(store))
    assert run(store, asking)
    assert before == state(store)


def test_a_released_savepoint_is_rolled_back_with_all(store: SQLAlchemyStore) -> None:
    """What a savepoint has kept is undone by the whole's rollback and kept by its commit, before any other write."""
    asking = ask()
    for commit in (False, True):
        with operation(store) as one:
            claim = one.enter(asking)
            assert isinstance(claim, Claim)
            with one._connection.begin_nested():
                charge(one, "kept")
            lost = one._connection.begin_nested()
            charge(one, "lost")
            lost.rollback()
            if commit:
                assert one.record(claim, asking, ANSWER, 3600)
                one.commit()
        assert (["kept"] if commit else []) == charges(store)


@contextmanager
def deferred(store: SQLAlchemyStore) -> Iterator[None]:
    """The app's table refers to another, and the database looks at that only when a transaction commits."""
    engine = app_engine(store)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", lambda driver, record: driver.execute("PRAGMA foreign_keys = ON"))
        with engine.connect() as connection:  # in memory there is one already
            connection.connection.dbapi_connection.execute("PRAGMA foreign_keys = ON")  # type: ignore[union-attr]
    execute(store, "DROP TABLE IF EXISTS charge")
    execute(store, "CREATE TABLE customer (name VARCHAR(255) PRIMARY KEY)")
    reference = "REFERENCES customer (name) DEFERRABLE INITIALLY DEFERRED"
    execute(store, f"CREATE TABLE charge (key VARCHAR(255) {reference})")
    yield
    execute(store, "DROP TABLE charge")
    execute(store, "DROP TABLE customer")


def test_a_commit_that_a_constraint_refuses(store: SQLAlchemyStore) -> None:
    """A constraint that fails at the commit is the app's own error; nothing of work, record or lock is left."""
    with deferred(store):
        before, asking = state(store), ask()
        with operation(store) as one:
            claim = one.enter(asking)
            assert isinstance(claim, Claim)
            charge(one)
            assert one.record(claim, asking, ANSWER, 3600)
            with pytest.raises(exc.IntegrityError):
                one.commit()
            assert not one._connection.in_transaction()
        assert (before, [], 0) == (state(store), charges(store), count(store))
        execute(store, "INSERT INTO customer (name) VALUES ('key-00000001')")
        assert run(store, asking)


def worked(one: Inside, asking: Asking, at: str) -> Claim:
    """An operation that has come as far as what fails ``at`` the record or the commit."""
    claim = one.enter(asking)
    assert isinstance(claim, Claim)
    if at == "commit":
        assert one.record(claim, asking, ANSWER, 3600)
    return claim


def end(one: Inside, claim: Claim, asking: Asking, at: str) -> None:
    """The step that is to fail."""
    if at == "record":
        one.record(claim, asking, ANSWER, 3600)
    else:
        one.commit()


@pytest.mark.parametrize("at", ["record", "commit"])
def test_a_transaction_that_has_ended_inside(store: SQLAlchemyStore, at: str) -> None:
    """A view that ends the transaction by a statement of its own gets an error, and no record without its work."""
    asking = ask()
    with operation(store) as one:
        claim = worked(one, asking, at)
        one._connection.exec_driver_sql("ROLLBACK")
        with pytest.raises(StoreError, match="has ended in the middle"):
            end(one, claim, asking, at)
    assert 0 == count(store)
    assert run(store, asking)


@pytest.mark.parametrize("at", ["record", "commit"])
def test_a_transaction_that_sqlalchemy_has_ended(store: SQLAlchemyStore, at: str) -> None:
    """The same where the view has rolled the connection back."""
    asking = ask()
    with operation(store) as one:
        claim = worked(one, asking, at)
        one._connection.rollback()
        with pytest.raises(StoreError, match="has ended in the middle"):
            end(one, claim, asking, at)
    assert 0 == count(store)
    assert run(store, asking)


@pytest.mark.parametrize("at", ["record", "commit"])
def test_a_transaction_that_is_aborted(postgres_store: SQLAlchemyStore, at: str) -> None:
    """What PostgreSQL would answer with a rollback that looks like a commit is an error."""
    asking = ask()
    with operation(postgres_store) as one:
        claim = worked(one, asking, at)
        with pytest.raises(exc.DBAPIError):
            one._connection.exec_driver_sql("SELECT 1/0")
        with pytest.raises(StoreError, match="has failed"):
            end(one, claim, asking, at)
    assert 0 == count(postgres_store)
    assert run(postgres_store, asking)


# A connection that is lost


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_commit_whose_reply_is_lost(tcp_url: str, cutting_proxy: CuttingProxy, carried_out: bool) -> None:
    """A connection lost at the commit leaves it unknown; the store's own look-up knows it."""
    with opened(tcp_url) as store:
        make_charges(store)
        asking = ask()
        with operation(store) as one:
            claim = one.enter(asking)
            assert isinstance(claim, Claim)
            charge(one)
            assert one.record(claim, asking, ANSWER, 3600)
            (cutting_proxy.lose_reply if carried_out else cutting_proxy.lose_request)("COMMIT")
            with pytest.raises(CommitUnknown):
                one.commit()
        found = store.find(asking.scope, asking.key)
        assert (asking.token if carried_out else None) == (found and found.token)
        assert (["key-00000001"] if carried_out else []) == charges(store)
        assert carried_out != run(store, asking)


@pytest.mark.parametrize("statement", ["BEGIN", "set_config", "completed"])
def test_a_connection_that_is_lost_before(tcp_url: str, cutting_proxy: CuttingProxy, statement: str) -> None:
    """A connection lost before the commit is the store's error, and no connection of the pool is broken after it."""
    with opened(tcp_url, pool_size=1, max_overflow=0) as store:
        make_charges(store)
        asking = ask()
        assert run(store, ask(key="another-key"))
        cutting_proxy.lose_reply(statement)
        with pytest.raises(StoreError) as caught:
            run(store, asking)
        assert type(caught.value) is StoreError
        assert 1 == count(store)
        while not run(store, asking):
            pass


def test_a_missing_table(store: SQLAlchemyStore) -> None:
    """A missing table says to run the migration."""
    store.table.drop(app_engine(store))
    with operation(store) as one, pytest.raises(StoreError, match="Run the migration"):
        one.enter(ask())


# What it costs, and what it leaves alone


def test_round_trips(tcp_url: str, cutting_proxy: CuttingProxy) -> None:
    """A first run is two messages, from BEGIN to look-up, and from record to COMMIT; a replay, or a duplicate, two."""
    with opened(tcp_url) as store:
        asking = ask()

        def once(asking: Asking) -> list[str]:
            before = cutting_proxy.round_trips
            with cutting_proxy.counting() as statements, operation(store) as one:
                claim = one.enter(asking)
                if isinstance(claim, Claim):
                    assert one.finish(claim, asking, ANSWER, 3600)
            assert len(statements) == cutting_proxy.round_trips - before
            return [" ".join(re.findall(r"(?:^|;\s*)(\w+)", text)) for text in statements]

        once(ask(key="opens-the-connection"))
        first = ["BEGIN SELECT SAVEPOINT SELECT", "INSERT COMMIT"]
        assert first == once(asking)
        assert [first[0], "ROLLBACK"] == once(asking)
        # Often enough for a driver that prepares what it sees often.
        assert [first] * 8 == [once(ask(key=f"key-{number}")) for number in range(8)]
        with store.connect() as connection:
            assert [] == connection.exec_driver_sql("SELECT name FROM pg_prepared_statements").all()
            left = "SELECT coalesce(current_setting('flask_idempotency.lock', true), '')"
            assert "" == connection.exec_driver_sql(left).scalar()


@pytest.mark.parametrize("listened", ["begin", "savepoint", "commit"])
def test_round_trips_beside_listeners(tcp_url: str, cutting_proxy: CuttingProxy, listened: str) -> None:
    """An app whose listeners count on BEGIN, SAVEPOINT or COMMIT gets each as a message of its own."""
    with opened(tcp_url) as store:
        sa.event.listen(app_engine(store), listened, lambda *_: None)
        for key in ("opens-the-connection", "key-00000001"):
            asking = ask(key=key)
            with cutting_proxy.counting() as statements, operation(store) as one:
                claim = one.enter(asking)
                assert isinstance(claim, Claim)
                assert one.finish(claim, asking, ANSWER, 3600)
        assert ["BEGIN", "SELECT", "INSERT", "COMMIT"] == [text.split()[0].upper() for text in statements]


def test_the_row_is_written_once(postgres_store: SQLAlchemyStore) -> None:
    """The record is one insert: no update, and no dead row."""
    assert run(postgres_store, ask())
    ((xmax, page),) = execute(postgres_store, "SELECT xmax::text, ctid::text FROM {table}")
    assert ("0", "(0,1)") == (xmax, page)


def test_schemas_that_are_translated(postgres_url: str) -> None:
    """Where the app's engine says in which schema the tables are, they are found there."""
    with opened(postgres_url) as store:
        engine = app_engine(store)
        execute(store, "CREATE SCHEMA tenant")
        moved = engine.execution_options(schema_translate_map={None: "tenant"})
        store.table.metadata.create_all(moved)
        asking = ask()
        for _ in range(2):
            with moved.connect() as connection:
                one = store.inside(connection)
                one.begin()
                found = one.enter(asking)
                if isinstance(found, Claim):
                    assert one.record(found, asking, ANSWER, 3600)
                    one.commit()
                one.rollback()
        assert isinstance(found, Stored)
        assert (0, 1) == (count(store), execute(store, "SELECT count(*) FROM tenant.{table}")[0][0])


@pytest.mark.parametrize("url", ["sqlite_url", "shared_psycopg2_url"])
def test_where_it_is_not_available(request: pytest.FixtureRequest, url: str) -> None:
    """A store that knows nothing of its database says where atomic mode is available; others have it."""
    with opened(request.getfixturevalue(url), portable=True) as store, app_engine(store).connect() as connection:
        assert not store.supports_atomic
        with pytest.raises(ConfigurationError, match="available on PostgreSQL and SQLite"):
            store.inside(connection)
    with opened(request.getfixturevalue(url)) as store:
        assert store.supports_atomic


# SQLite's one writer


def test_somebody_else_holds_the_writer(sqlite_url: str) -> None:
    """A writer that is held for longer than the busy timeout is the store's error, and the settings are restored."""
    with opened(sqlite_url, connect_args={"timeout": 0.05}) as store:
        make_charges(store)
        before = state(store)
        with opened_raw(store) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="busy timeout"), operation(store):
                pytest.fail("two writers")
            assert before == state(store)
        assert run(store, ask())


@contextmanager
def opened_raw(store: SQLAlchemyStore) -> Iterator[Any]:
    """A connection of somebody else's to the same file."""
    connection = sqlite3.connect(str(app_engine(store).url.database), isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def test_a_reader_keeps_the_commit_off(sqlite_url: str) -> None:
    """Without write-ahead logging a reader may keep the commit off for too long: then all is undone."""
    with opened(sqlite_url, connect_args={"timeout": 0.05}) as store:
        make_charges(store)
        before, asking = state(store), ask()
        with opened_raw(store) as reader, operation(store) as one:
            claim = one.enter(asking)
            assert isinstance(claim, Claim)
            assert one.record(claim, asking, ANSWER, 3600)
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM charge").fetchall()
            with pytest.raises(Undone):
                one.commit()
            assert not one._connection.in_transaction()
        assert (before, 0) == (state(store), count(store))
        assert run(store, asking)


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_a_listener_that_begins_transactions(sqlite_store: SQLAlchemyStore, begin: str) -> None:
    """The known recipe, a listener that begins, is overruled: the operation has the writer, and its work is atomic."""
    engine = app_engine(sqlite_store)
    with engine.connect() as connection:
        connection.connection.dbapi_connection.isolation_level = None  # type: ignore[union-attr]
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    with operation(sqlite_store) as one:
        if sqlite_store.separate:
            with opened_raw(sqlite_store) as other:
                other.execute("PRAGMA busy_timeout = 10")
                with pytest.raises(Exception, match="database is locked"):
                    other.execute("BEGIN IMMEDIATE")
        charge(one)
    assert [] == charges(sqlite_store)
    assert run(sqlite_store, ask())
    assert ["key-00000001"] == charges(sqlite_store)
    assert state(sqlite_store)["isolation_level"] is None


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_the_threads_own_transaction(sqlite_store: SQLAlchemyStore, journal: str) -> None:
    """The operation has the writer: the thread's other writes end at once, since waiting would be for itself."""
    execute(sqlite_store, f"PRAGMA journal_mode = {journal}")
    with operation(sqlite_store):
        with pytest.raises(WriterHeld):
            sqlite_store.claim(ask())
        with pytest.raises(WriterHeld), operation(sqlite_store):
            pytest.fail("an operation within another")
    assert run(sqlite_store, ask())
    claimed(sqlite_store, ask(key="another-key"))


def test_the_apps_own_pending_writes(sqlite_store: SQLAlchemyStore) -> None:
    """Uncommitted writes of the thread's own are neither waited for nor touched."""
    with app_engine(sqlite_store).connect() as connection:
        connection.execute(sa.text("INSERT INTO charge (key) VALUES ('pending')"))
        with app_engine(sqlite_store).connect() as second:
            one = sqlite_store.inside(second)
            with pytest.raises(WriterHeld):
                one.begin()
            connection.commit()
    assert ["pending"] == charges(sqlite_store)
    assert run(sqlite_store, ask())


@pytest.fixture
def memory_store(memory_url: str) -> Iterator[SQLAlchemyStore]:
    """An empty store in SQLite's memory, and the app's table."""
    with opened(memory_url, memory=True) as store:
        make_charges(store)
        yield store


def test_the_default_mode_waits_in_memory(memory_store: SQLAlchemyStore) -> None:
    """In memory another thread's claim in default mode waits for the operation's end, and commits nothing of it."""
    with operation(memory_store) as one:
        waiting = background(memory_store.claim, ask(key="another-key"))
        charge(one)
        threading.Event().wait(0.05)
        assert not waiting.done()
        one.rollback()
    assert isinstance(waiting.result(10), Claim)
    assert ([], 1) == (charges(memory_store), count(memory_store))


def test_two_operations_in_memory(memory_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory a second operation waits for the first one's end, for a bounded time, and rolls nothing of it back."""
    asking = ask()
    with operation(memory_store) as one:
        claim = one.enter(asking)
        assert isinstance(claim, Claim)
        monkeypatch.setattr(inside_sqlite, "PATIENCE", 0.02)

        def second(kept: list[Any]) -> None:
            connection = app_engine(memory_store).connect()
            kept.append(connection)
            two = memory_store.inside(connection)
            with pytest.raises(StoreError, match="Another thread's atomic operation"):
                two.begin()

        kept: list[Any] = []
        background(second, kept).result(10)
        monkeypatch.undo()
        waiting = background(run, memory_store, ask(key="another-key"))
        charge(one)
        assert one.record(claim, asking, ANSWER, 3600)
        assert not waiting.done()
        one.commit()
        one.rollback()
    assert waiting.result(10)
    assert ["another-key", "key-00000001"] == charges(memory_store)
    for connection in kept:
        connection.close()


def test_a_connection_given_back_in_memory(memory_store: SQLAlchemyStore) -> None:
    """In memory an operation that waited for another's end is not rolled back when that one's connection is closed."""
    connected, written, begun, closed = (threading.Event() for _ in range(4))

    def second() -> None:
        with app_engine(memory_store).connect() as connection:
            connected.set()
            assert written.wait(10)
            two, asking = memory_store.inside(connection), ask(key="another-key")
            two.begin()
            begun.set()
            claim = two.enter(asking)
            assert isinstance(claim, Claim)
            charge(two, asking.key)
            assert closed.wait(10)
            assert two.record(claim, asking, ANSWER, 3600)
            two.commit()

    with operation(memory_store) as one:
        waiting = background(second)
        assert connected.wait(10)
        claim = one.enter(ask())
        assert isinstance(claim, Claim)
        charge(one)
        written.set()
        assert one.record(claim, ask(), ANSWER, 3600)
        one.commit()
        assert begun.wait(10)
    closed.set()
    waiting.result(10)
    assert ["another-key", "key-00000001"] == charges(memory_store)


def test_the_driver_begins_nothing_by_itself(sqlite_store: SQLAlchemyStore) -> None:
    """A write after the view has ended the transaction begins no other one, which would pass for it."""
    with operation(sqlite_store) as one:
        claim = one.enter(ask())
        assert isinstance(claim, Claim)
        one._connection.exec_driver_sql("ROLLBACK")
        charge(one)
        with pytest.raises(StoreError, match="has ended in the middle"):
            one.record(claim, ask(), ANSWER, 3600)
    assert 0 == count(sqlite_store)


@pytest.mark.skipif(not hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL"), reason="the driver has no such mode")
@pytest.mark.parametrize("autocommit", [True, False])
def test_the_drivers_newer_modes(sqlite_url: str, autocommit: bool) -> None:
    """In the modes that Python 3.12 brought, the operation is one transaction, and the mode is as before after it."""
    with opened(sqlite_url, connect_args={"autocommit": autocommit, "timeout": 0.05}) as store:
        make_charges(store)
        before = state(store)
        with operation(store) as one:
            with one._connection.begin_nested():
                charge(one)
            with opened_raw(store) as other:
                other.execute("PRAGMA busy_timeout = 0")
                with pytest.raises(sqlite3.OperationalError):
                    other.execute("BEGIN IMMEDIATE")
        assert ([], before) == (charges(store), state(store))
        assert run(store, ask())
        assert (["key-00000001"], before) == (charges(store), state(store))
        with operation(store) as one:
            assert isinstance(one.enter(ask()), Stored)
