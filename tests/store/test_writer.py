"""SQLite's one writer, and its one connection in memory."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim, Stored
from flask_idempotency.errors import StoreError, WriterHeld
from flask_idempotency.store import SQLAlchemyStore, writer
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, count, opened
from tests.support.barrier import background

INSERT = sa.text("INSERT INTO orders (n) VALUES (1)")
SELECT = sa.text("SELECT count(*) FROM orders")
#: The busy timeout is longer than pytest lets a test take.
PATIENT = {"timeout": 90}


def begins_itself(engine: sa.Engine, statement: str) -> None:
    """SQLAlchemy's recipe for transactions that SQLite's driver does not begin by itself."""

    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    sa.event.listen(engine, "connect", connect)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(statement))


def with_orders(store: SQLAlchemyStore) -> SQLAlchemyStore:
    """The app has a table of its own, and its store is prepared as the extension does it."""
    with app_engine(store).begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (n INTEGER)"))
        connection.execute(INSERT)
    store.prepare()
    return store


@pytest.fixture(params=["classic", "BEGIN"])
def driver_mode(request: pytest.FixtureRequest) -> str:
    """Who begins transactions: the driver, with the first write, or the app."""
    return str(request.param)


@pytest.fixture
def file_store(sqlite_url: str, driver_mode: str) -> Iterator[SQLAlchemyStore]:
    """In a file with write-ahead logging."""
    with opened(sqlite_url, connect_args=PATIENT) as store:
        with app_engine(store).connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        if driver_mode == "BEGIN":
            begins_itself(app_engine(store), "BEGIN")
            app_engine(store).dispose()
        yield with_orders(store)


@pytest.fixture
def shared_store(driver_mode: str) -> Iterator[SQLAlchemyStore]:
    """In memory, where the app and the store have one connection."""
    with opened("sqlite://", memory=True) as store:
        if driver_mode == "BEGIN":
            begins_itself(app_engine(store), "BEGIN")
            raw = app_engine(store).raw_connection()
            raw.dbapi_connection.isolation_level = None  # type: ignore[union-attr]
            raw.close()
        yield with_orders(store)


def held_at_once(call: Callable[[], object]) -> None:
    """The call is refused, and without waiting for the busy timeout."""
    with pytest.raises(WriterHeld, match="uncommitted writes in this very thread"):
        call()


@pytest.mark.scenario(20)
def test_own_writes_are_not_waited_for(file_store: SQLAlchemyStore) -> None:
    """With uncommitted writes of this thread every call that writes is refused at once, and none that reads."""
    claim = claimed(file_store, ask())
    recorded = claimed(file_store, ask(key="recorded"))
    file_store.record(recorded, ANSWER, 3600)
    with app_engine(file_store).connect() as connection:
        connection.execute(INSERT)
        for call in (
            lambda: file_store.claim(ask(key="new")),
            lambda: file_store.record(claim, ANSWER, 3600),
            lambda: file_store.release(claim),
            lambda: file_store.renew([claim]),
            lambda: file_store.prune(10),
        ):
            held_at_once(call)
        assert stored(file_store, ask(key="recorded")).recorded == ANSWER
        assert file_store.find("tenant-1", "key-00000001") is not None
        assert file_store.prunable() == 0
        connection.commit()
        assert isinstance(file_store.claim(ask(key="new")), Claim)
        connection.execute(INSERT)
        connection.rollback()
        assert file_store.record(claim, ANSWER, 3600)
        assert connection.execute(SELECT).scalar() == 2


def test_own_reads_are_no_hindrance(file_store: SQLAlchemyStore) -> None:
    """A thread that has only read, in a transaction that is still open, is not refused."""
    with app_engine(file_store).connect() as connection:
        assert connection.execute(SELECT).scalar() == 1
        claim = claimed(file_store, ask())
        assert file_store.record(claim, ANSWER, 3600)
        assert connection.execute(SELECT).scalar() == 1


def test_own_reads_without_write_ahead_logging(sqlite_url: str) -> None:
    """In the other journal modes an open reader of this thread would keep the store waiting: it is refused at once."""
    with opened(sqlite_url, connect_args=PATIENT) as store:
        begins_itself(app_engine(store), "BEGIN")
        app_engine(store).dispose()
        with_orders(store)
        with app_engine(store).connect() as connection:
            connection.execute(SELECT)
            with pytest.raises(WriterHeld, match="journal_mode=WAL"):
                store.claim(ask())
            connection.rollback()
            claimed(store, ask())


def test_reads_after_a_commit_are_no_hindrance(file_store: SQLAlchemyStore) -> None:
    """Nor is one that wrote, committed, and reads again on the same connection."""
    with app_engine(file_store).connect() as connection:
        connection.execute(INSERT)
        connection.commit()
        assert connection.execute(SELECT).scalar() == 2
        assert file_store.record(claimed(file_store, ask()), ANSWER, 3600)


def test_writes_of_other_threads_are_waited_for(file_store: SQLAlchemyStore) -> None:
    """What another thread has not committed yet is waited for, as long as the app's busy timeout says."""
    with app_engine(file_store).connect() as connection:
        connection.execute(INSERT)
        waiting = background(file_store.claim, ask())
        with pytest.raises(futures.TimeoutError):  # the built-in one, from Python 3.11 on
            waiting.result(0.2)
        connection.commit()
    assert isinstance(waiting.result(10), Claim)


def test_a_writer_held_for_too_long(sqlite_url: str) -> None:
    """When the app's busy timeout is over the error says whose writer it was not, and what to do."""
    with opened(sqlite_url, connect_args={"timeout": 0.1}) as store:
        with_orders(store)
        with app_engine(store).connect() as connection:
            connection.execute(INSERT)
            with pytest.raises(StoreError, match="busy timeout") as caught:
                background(store.claim, ask()).result(10)
            assert not isinstance(caught.value, WriterHeld)


def test_a_writer_taken_before_any_write(sqlite_url: str) -> None:
    """A thread that began with BEGIN IMMEDIATE is told, after the busy timeout, that it waits for itself."""
    with opened(sqlite_url, connect_args={"timeout": 0.1}) as store:
        begins_itself(app_engine(store), "BEGIN IMMEDIATE")
        with_orders(store)
        app_engine(store).dispose()
        raw = app_engine(store).raw_connection()
        raw.cursor().execute("PRAGMA journal_mode=WAL")
        raw.close()
        with app_engine(store).connect() as connection:
            connection.execute(SELECT)
            with pytest.raises(WriterHeld):
                store.claim(ask())


@pytest.mark.skipif(not hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL"), reason="the driver has no such mode")
def test_the_drivers_newer_mode(sqlite_url: str) -> None:
    """Under the driver's ``autocommit=False`` a reader is in a transaction too, and not refused; a writer is."""
    with opened(sqlite_url, connect_args={"autocommit": False}) as store:
        with closing(sqlite3.connect(str(app_engine(store).url.database))) as outside:
            outside.execute("PRAGMA journal_mode=WAL")
        with_orders(store)
        with app_engine(store).connect() as connection:
            connection.execute(SELECT)
            claim = claimed(store, ask())
            connection.rollback()
            connection.execute(INSERT)
            held_at_once(lambda: store.record(claim, ANSWER, 3600))
            connection.commit()
            assert store.record(claim, ANSWER, 3600)


def test_connections_are_followed_to_their_end(file_store: SQLAlchemyStore) -> None:
    """Connections that went back, were invalidated, detached or forgotten count no more."""
    engine = app_engine(file_store)
    with engine.connect() as connection:
        connection.execute(INSERT)
        connection.invalidate()
    detached = engine.raw_connection()
    detached.detach()
    detached.close()
    engine.connect().execute(INSERT).close()
    gc.collect()
    with engine.connect() as connection:
        connection.execute(INSERT)
    assert file_store._ready().run._watch._all() == []  # type: ignore[union-attr]
    assert isinstance(file_store.claim(ask()), Claim)


def test_memory_is_not_committed_over_own_writes(shared_store: SQLAlchemyStore) -> None:
    """In memory every call over uncommitted writes is refused at once, and the writes are untouched."""
    claim = claimed(shared_store, ask())
    with app_engine(shared_store).connect() as connection:
        connection.execute(INSERT)
        for call in (
            lambda: shared_store.claim(ask()),
            lambda: shared_store.find("tenant-1", "key-00000001"),
            lambda: shared_store.record(claim, ANSWER, 3600),
            lambda: shared_store.renew([claim]),
            lambda: shared_store.prunable(),
        ):
            held_at_once(call)
        assert connection.execute(SELECT).scalar() == 2
        connection.rollback()
        assert connection.execute(SELECT).scalar() == 1
    assert shared_store.record(claim, ANSWER, 3600)


def test_memory_waits_for_other_threads(shared_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's uncommitted writes on the one connection are waited for, a bounded time."""
    engine = app_engine(shared_store)
    with engine.connect() as connection:
        connection.execute(INSERT)
        waiting = background(shared_store.claim, ask())
        with pytest.raises(futures.TimeoutError):  # the built-in one, from Python 3.11 on
            waiting.result(0.2)
        connection.commit()
        # Before this connection goes back: its pool would roll back whatever is under way on the one that all share.
        assert isinstance(waiting.result(10), Claim)
    monkeypatch.setattr(writer, "PATIENCE", 0.1)
    with engine.connect() as connection:
        connection.execute(INSERT)
        with pytest.raises(WriterHeld, match="in-memory"):
            background(shared_store.claim, ask(key="late")).result(10)
        connection.rollback()
        assert connection.execute(SELECT).scalar() == 2


def test_memory_leaves_a_reader_as_it_was(shared_store: SQLAlchemyStore) -> None:
    """A transaction that only read goes on after the store's own, and can still be rolled back."""
    with app_engine(shared_store).connect() as connection:
        connection.execute(SELECT)
        claim = claimed(shared_store, ask())
        assert isinstance(shared_store.claim(ask()), Stored)
        connection.execute(INSERT)
        connection.rollback()
        assert connection.execute(SELECT).scalar() == 1
        connection.rollback()
        assert shared_store.record(claim, ANSWER, 3600)
    assert count(shared_store) == 1


def test_memory_after_dispose(memory_store: SQLAlchemyStore) -> None:
    """An app that disposes of its engine gets an empty database, and the store finds it."""
    engine = app_engine(memory_store)
    claimed(memory_store, ask())
    engine.dispose()
    memory_store.table.metadata.create_all(engine)
    claimed(memory_store, ask())


@pytest.mark.parametrize(
    ("url", "separate"),
    [
        ("sqlite://", False),
        ("sqlite:///:memory:", False),
        ("sqlite:///file::memory:?uri=true", False),
        pytest.param(
            "sqlite:///file:x?mode=memory&cache=shared&uri=true",
            False,
            marks=pytest.mark.filterwarnings("ignore:Selection of the SingletonThreadPool"),
        ),
        ("sqlite:///{path}", True),
        ("sqlite:///file:{path}?uri=true", True),
    ],
)
def test_whether_connections_are_separate(tmp_path: Any, url: str, separate: bool) -> None:
    """Every way to say "in memory" is understood, and no connection is opened to find out."""
    engine = sa.create_engine(url.format(path=tmp_path / "test.sqlite"))
    store = SQLAlchemyStore(engine, sa.MetaData())
    store.prepare()
    assert store.separate is separate
    assert not (tmp_path / "test.sqlite").exists()
    store.table.metadata.create_all(engine)
    assert isinstance(store.claim(ask()), Claim)
    assert isinstance(store.claim(ask()), Stored)
    store.close()
    engine.dispose()
