"""Atomic mode's side of the store: one transaction of the app's, the key's record in it."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
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
from flask_idempotency.store import SQLAlchemyStore, atomic, inside
from flask_idempotency.store.inside import Inside
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import BACK_ENDS, app_engine, backend_of, count, execute, opened, row, shift
from tests.support.barrier import background, together
from tests.support.postgres import PgBouncer, Postgres
from tests.support.proxy import CuttingProxy

THREADS = 8
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
ATOMIC = [name for name, back_end in BACK_ENDS.items() if not back_end.portable]


@contextmanager
def operation(store: SQLAlchemyStore) -> Iterator[Inside]:
    """An operation that has begun, on a connection of the app's; rolled back at the end, unless it was committed."""
    with app_engine(store).connect() as connection:
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
        assert one.record(found, asking, recorded, 3600)
        one.commit()
        return True


def charges(store: SQLAlchemyStore) -> list[str]:
    """The keys whose work is there."""
    return [key for (key,) in execute(store, "SELECT key FROM charge ORDER BY key")]


def make_charges(store: SQLAlchemyStore) -> None:
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
        race = Race(store, 300).go()
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
    monkeypatch.setattr(atomic, "_DRIVERS", ())
    monkeypatch.setattr(atomic.Bound, "message", None)
    Race(postgres_store, 60).go().assert_once()


def waits_for_lock(store: SQLAlchemyStore) -> bool:
    """Whether somebody waits for an advisory lock."""
    return bool(execute(store, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))


def test_the_look_is_younger_than_the_lock(postgres_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the one message the look-up has a snapshot of its own: it sees what was committed while the lock was got."""
    message = atomic.Bound.message

    def waiting(self: atomic.Bound, text: str, values: Any) -> Any:
        # As if the other one's commit came just after this statement's snapshot and just before its lock.
        tried = "pg_try_advisory_xact_lock(%(lock)s)"
        assert tried in text
        return message(self, text.replace(tried, "(SELECT true FROM pg_advisory_xact_lock(%(lock)s))"), values)

    asking = ask()
    with operation(postgres_store) as one:
        claim = one.enter(asking)
        assert isinstance(claim, Claim)
        monkeypatch.setattr(atomic.Bound, "message", waiting)

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
    with opened(pgbouncer.url(postgres_database, driver), pool_size=THREADS) as store:
        make_charges(store)
        with operation(store) as one:
            assert isinstance(one.enter(ask(key="key-3")), Claim)
            one._driver.close()
        Race(store, 50).go(4).assert_once()


def test_a_collision_of_hashes(postgres_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two keys whose hashes collide the second in flight is turned away; neither gets the other's answer."""
    monkeypatch.setattr(atomic, "lock_number", lambda scope, key: -(2**63))
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
    numbers = {atomic.lock_number(scope, key) for scope, key in pairs}
    assert len(pairs) == len(numbers)
    many = [atomic.lock_number("scope", f"key-{number}") for number in range(100)]
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
            with operation(store) as two:
                found = two.enter(ask(key=asking.key))
            assert found is None or isinstance(found, Stored)
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
