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
