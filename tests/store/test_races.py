"""Many at once: threads, processes, and transactions of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim, Stored
from flask_idempotency.errors import StoreError
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.store.backend import Backend
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, backend_of, count, execute, opened, shift
from tests.support.barrier import background, together
from tests.support.server import ROOT

THREADS = 8


@pytest.fixture(params=["read committed", "repeatable read", "serializable"])
def isolated_store(request: pytest.FixtureRequest, tcp_url: str) -> Iterator[SQLAlchemyStore]:
    """A store on a server whose default isolation is each of PostgreSQL's in turn."""
    level = request.param
    with opened(tcp_url, pool_size=1) as store:
        database = app_engine(store).url.database
        execute(store, f"ALTER DATABASE {database} SET default_transaction_isolation = '{level}'")
        app_engine(store).dispose()
        with backend_of(store).run._own.connect() as connection:
            assert connection.execute(sa.text("SHOW transaction_isolation")).scalar() == level
        yield store


@pytest.mark.scenario(1, 60)
def test_one_claim_a_key_at_every_isolation_level(isolated_store: SQLAlchemyStore) -> None:
    """Threads that claim, take over, renew and record the same keys never get an error, nor a second claim."""
    store, keys = isolated_store, [f"key-{number}" for number in range(25)]

    def everything(number: int) -> list[tuple[str, bool]]:
        found = []
        for key in keys:
            one = store.claim(ask(key=key))
            if isinstance(one, Claim):
                assert store.renew([one]) == {one.token}
                assert store.record(one, ANSWER, 3600)
            found.append((one.token, isinstance(one, Claim)))
        return found

    for holders in zip(*together(THREADS, everything), strict=True):
        assert len({token for token, _ in holders}) == 1
        assert [granted for _, granted in holders].count(True) == 1
    shift(store, 3601)
    seen = {key: stored(store, ask(key=key)) for key in keys}
    taken = together(THREADS, lambda _: [store.take(ask(key=key), seen[key]) is not None for key in keys])
    assert [sum(column) for column in zip(*taken, strict=True)] == [1] * len(keys)
    shift(store, 86401)
    assert sum(together(THREADS, lambda _: store.prune(10).count)) <= len(keys)
    while store.prune(10).count:
        pass
    assert count(store) == 0


@pytest.mark.scenario(1, 65)
def test_one_claim_a_key_among_processes(database_url: str) -> None:
    """Processes that start at once claim each key exactly once between them."""
    check_one_claim_a_key_among_processes(database_url)


@pytest.mark.scenario(1, 65)
def test_one_claim_a_key_among_processes_on_mariadb(mysql_url: str) -> None:
    """So they do on MariaDB."""
    check_one_claim_a_key_among_processes(mysql_url)


def check_one_claim_a_key_among_processes(database_url: str) -> None:
    """Start them, and look at what they got."""
    processes, keys = 2, 30
    with opened(database_url) as store:
        command = [sys.executable, "-m", "tests.store.worker", database_url, store.table.name, str(keys)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        workers: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(processes)]
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        lines = [worker.communicate(timeout=30)[0].splitlines() for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * processes
        assert [len(one) for one in lines] == [keys] * processes
        for one_key in zip(*lines, strict=True):
            assert len({line.split()[0] for line in one_key}) == 1
            assert sum(line.endswith("True") for line in one_key) == 1


@pytest.mark.scenario(60)
@pytest.mark.parametrize("commit", [True, False])
def test_an_insert_of_another_transaction(postgres_store: SQLAlchemyStore, commit: bool) -> None:
    """While another transaction has inserted the key, a claim waits for its end, and is granted only if it vanished."""
    store, engine = postgres_store, app_engine(postgres_store)
    claimed(store, ask())
    with engine.connect() as connection:
        columns = ", ".join(column.name for column in store.table.c if column.name not in ("id", "key"))
        name = store.table.name
        connection.execute(sa.text(f"INSERT INTO {name} (key, {columns}) SELECT 'other', {columns} FROM {name}"))
        waiting = background(store.claim, ask(key="other"))
        blocked = sa.text(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype IN ('transactionid', 'spectoken')"
        )
        while not waiting.done() and not connection.execute(blocked).scalar():
            pass
        assert not waiting.done()
        connection.commit() if commit else connection.rollback()
    assert isinstance(waiting.result(10), Stored if commit else Claim)
    assert count(store) == 2


def test_a_claim_that_waited_is_good_for_a_lease(postgres_store: SQLAlchemyStore) -> None:
    """A claim granted after a wait as long as its lease begins that lease anew, so that nobody takes it over."""
    store, engine = postgres_store, app_engine(postgres_store)
    claimed(store, ask())
    with engine.connect() as connection:
        columns = ", ".join(column.name for column in store.table.c if column.name not in ("id", "key"))
        name = store.table.name
        connection.execute(sa.text(f"INSERT INTO {name} (key, {columns}) SELECT 'other', {columns} FROM {name}"))
        waiting = background(store.claim, ask(key="other", lock_timeout=0.6))
        with pytest.raises(futures.TimeoutError):  # the built-in one, from Python 3.11 on
            waiting.result(0.7)
        connection.rollback()
    claim = waiting.result(10)
    assert isinstance(claim, Claim)
    assert stored(store, ask(key="other")).age_seconds < 0.5


@pytest.mark.scenario(10)
def test_a_key_that_comes_and_goes(store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is in the way of the insert, and gone for the look-up, is asked for again, but not for ever."""
    backend, looks = backend_of(store), []
    once = type(backend)._claim_once

    def flickering(self: Backend, asking: Any) -> Any:
        looks.append(asking.token)
        return None if len(looks) < wanted else once(self, asking)

    monkeypatch.setattr(type(backend), "_claim_once", flickering)
    wanted = 3
    assert isinstance(store.claim(ask()), Claim)
    assert len(looks) == 3
    wanted = 10**6
    with pytest.raises(StoreError, match="gone whenever it was looked up"):
        store.claim(ask(key="another"))
    assert count(store) == 1


@pytest.mark.scenario(10)
def test_the_loser_of_an_insert_looks_again(store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds nothing and is then too late for the insert returns what the winner has stored."""
    backend = backend_of(store)
    if backend.returning:
        pytest.skip("inserts and looks in one message")
    winner, look = ask(), type(backend)._look

    def late(self: Backend, scope: str, key: str) -> Any:
        monkeypatch.setattr(type(backend), "_look", look)
        found = list(look(self, scope, key))
        claimed(store, winner)
        return found

    monkeypatch.setattr(type(backend), "_look", late)
    found = store.claim(ask())
    assert isinstance(found, Stored)
    assert found.token == winner.token


@pytest.mark.scenario(3, 11)
@pytest.mark.parametrize("retention", [60.0, 86400.0])
def test_a_sign_of_life_in_between(
    portable_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch, retention: float
) -> None:
    """Where a claim is judged first and taken then, or pruned, one that was renewed meanwhile stays its holder's."""
    store, backend = portable_store, backend_of(portable_store)
    claim = claimed(store, ask(retention=retention))
    times, gone = backend._times, backend._gone

    def renewed(result: Any) -> Any:
        assert store.renew([claim]) == {claim.token}
        return result

    shift(store, 3600)
    seen = stored(store, ask())
    assert (seen.stale, seen.expired) == (True, retention < 3600)
    monkeypatch.setattr(
        backend, "_times", lambda seconds=0: times(seconds) if seconds == 0 else renewed(times(seconds))
    )
    assert store.take(ask(), seen) is None
    shift(store, 3600)
    monkeypatch.setattr(backend, "_gone", lambda limit: renewed(gone(limit)))
    assert store.prune(10).count == 0
    assert store.record(claim, ANSWER, 3600)


def test_distinct_keys_never_wait_for_each_other(sqlite_url: str) -> None:
    """On one SQLite file many threads with keys of their own all succeed, with a pool of one."""
    with opened(sqlite_url) as store:
        one = SQLAlchemyStore(app_engine(store), store.table.metadata, table_name=store.table.name, pool_size=1)

        def first_run(number: int) -> bool:
            which = (one, store)[number % 2]
            claims = [claimed(which, ask(key=f"key-{number}-{turn}")) for turn in range(5)]
            return all(which.record(claim, ANSWER, 3600) for claim in claims)

        assert together(THREADS, first_run) == [True] * THREADS
        assert count(store) == 5 * THREADS
        one.close()
