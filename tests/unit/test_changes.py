"""What a request has committed to the app's databases, on real ones."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from contextvars import copy_context
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, copy_current_request_context, request
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from flask_idempotency import changes as module
from flask_idempotency.changes import ENVIRON, Changes, has_settings, noting, watch, wrote
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.support.barrier import background, together
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy

pytestmark = pytest.mark.one_driver

INSERT = "INSERT INTO charge (amount) VALUES (4242)"
FAILING = "INSERT INTO charge (id, amount) VALUES (1, 4242)"  # there is one already
DANGLING = "INSERT INTO charge (id, amount, parent) VALUES (200, 4242, 99)"  # refused at the commit
SELECT = "SELECT * FROM charge"


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charge"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    parent: Mapped[int | None] = mapped_column(sa.ForeignKey("charge.id", deferrable=True, initially="DEFERRED"))


def make_engine(url: str, **options: Any) -> sa.Engine:
    """An engine whose database has the table, with one row. Nobody's changes."""
    engine = sa.create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys = ON"))
    with noting(None):
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(sa.insert(Charge).values(id=1, amount=1))
            if engine.dialect.name == "postgresql":
                connection.exec_driver_sql("SELECT setval('charge_id_seq', 100)")
    return engine


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    """A watched engine."""
    watch()
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def tcp_engine(tcp_url: str) -> Iterator[sa.Engine]:
    """A watched engine whose messages the proxy can lose, with a connection in its pool."""
    watch()
    engine = make_engine(tcp_url)
    yield engine
    engine.dispose()


@pytest.fixture
def changes() -> Iterator[Changes]:
    """What the test commits."""
    changes = Changes()
    with noting(changes):
        yield changes


def run(engine: sa.Engine, *statements: str) -> None:
    """Carry out statements in one transaction and commit it."""
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


# What counts


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_settings(postgres_url: str, end: str) -> None:
    """Whether a transaction has settings is known until it ends, by a method or by hand, and not of the next one."""
    watch()
    engine = make_engine(postgres_url, pool_size=1)
    for by_hand in (False, True):
        with engine.connect() as connection:
            assert not has_settings(connection)
            connection.exec_driver_sql("SET LOCAL app.tenant = 'a'")
            assert (True, False) == (has_settings(connection), wrote(connection))
            connection.exec_driver_sql(end) if by_hand else getattr(connection, end)()
            assert not has_settings(connection)
            connection.exec_driver_sql("SELECT set_config('app.tenant', 'a', true)")
            assert has_settings(connection)
        with engine.connect() as connection:
            assert not has_settings(connection)
    engine.dispose()


def test_nothing(changes: Changes) -> None:
    """A request that did nothing has committed nothing, and has nothing to say."""
    assert (False, "") == (changes.committed, changes.seen)


def test_a_write_and_its_commit(engine: sa.Engine, changes: Changes) -> None:
    """A write counts when its transaction commits, and no sooner."""
    with engine.connect() as connection:
        connection.execute(sa.insert(Charge).values(amount=4242))
        assert not changes.committed
        connection.commit()
    assert (True, "INSERT INTO charge") == (changes.committed, changes.seen)


@pytest.mark.parametrize(
    "write",
    [
        lambda session: session.add(Charge(amount=4242)),
        lambda session: session.add_all([Charge(amount=1), Charge(amount=2)]),
        lambda session: session.execute(sa.update(Charge).values(amount=4242)),
        lambda session: session.execute(sa.text(INSERT)),
        lambda session: session.execute(sa.insert(Charge), [{"amount": 1}, {"amount": 2}]),
        lambda session: session.connection().exec_driver_sql(INSERT),
        lambda session: session.delete(session.get(Charge, 1)),
    ],
)
def test_every_way_to_write(engine: sa.Engine, changes: Changes, write: Any) -> None:
    """The ORM's flush, Core's statements, many at once, text, and SQL for the driver all count."""
    with Session(engine) as session:
        write(session)
        session.flush()
        assert not changes.committed
        session.commit()
    assert changes.committed


def test_reads(engine: sa.Engine, changes: Changes) -> None:
    """A transaction that only reads, locks rows included, may be committed."""
    with Session(engine) as session:
        session.get(Charge, 1, with_for_update=True)
        session.commit()
    assert not changes.committed


def test_a_rollback(engine: sa.Engine, changes: Changes) -> None:
    """What was rolled back does not count, and does not stick to the connection."""
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        connection.rollback()
        connection.exec_driver_sql(SELECT)
        connection.commit()
    assert not changes.committed


def test_a_connection_that_is_closed(engine: sa.Engine, changes: Changes) -> None:
    """A write that nobody commits does not count, and leaves nothing behind in the pool."""
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
    run(engine, SELECT)
    assert not changes.committed


def test_a_connection_that_is_forgotten(engine: sa.Engine, changes: Changes) -> None:
    """A connection that comes back to the pool as garbage leaves nothing behind there either."""
    connection = engine.connect()
    connection.exec_driver_sql(INSERT)
    # As an abandoned one is: SQLAlchemy's object is gone, and no rollback was asked for.
    fairy = connection._dbapi_connection
    del connection
    gc.collect()
    fairy._checkin()  # type: ignore[union-attr]
    run(engine, SELECT)
    assert not changes.committed


def test_each_commit_counts_once(engine: sa.Engine, changes: Changes) -> None:
    """Three writes in two transactions are three, and a commit of nothing more adds nothing."""
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE charge SET amount = 4242")
        connection.exec_driver_sql(INSERT)
        connection.commit()
        connection.exec_driver_sql(INSERT)
        connection.commit()
        connection.exec_driver_sql(SELECT)
        connection.commit()
    assert "UPDATE charge (and 2 more)" == changes.seen


def test_a_savepoint_is_no_commit(engine: sa.Engine, changes: Changes) -> None:
    """Releasing a savepoint commits nothing while the transaction is open, and its writes count at the commit."""
    with Session(engine) as session:
        session.execute(sa.insert(Charge).values(amount=1))
        with session.begin_nested():
            session.add(Charge(amount=4242))
        assert not changes.committed
        session.commit()
    assert "INSERT INTO charge (and 1 more)" == changes.seen


def test_a_savepoint_that_is_rolled_back(engine: sa.Engine, changes: Changes) -> None:
    """Going back to a savepoint does not make the writes before it unseen."""
    with Session(engine) as session:
        session.execute(sa.insert(Charge).values(amount=1))
        session.begin_nested().rollback()
        session.commit()
    assert changes.committed


def test_sqlites_outermost_savepoint(sqlite_url: str, changes: Changes) -> None:
    """Where SQLite's driver has begun no transaction, releasing the savepoint commits, whatever comes after."""
    watch()
    engine = make_engine(sqlite_url)
    with Session(engine) as session:
        with session.begin_nested():
            session.add(Charge(amount=4242))
        session.rollback()
    with engine.connect() as connection:
        assert 2 == connection.scalar(sa.select(sa.func.count()).select_from(Charge))
    assert changes.committed


# Whose it is


def test_a_write_from_before(engine: sa.Engine, changes: Changes) -> None:
    """A write before the claim that is committed after it counts."""
    with engine.connect() as connection:
        with noting(None):
            connection.exec_driver_sql(INSERT)
        connection.commit()
    assert changes.committed


def test_a_commit_from_before(engine: sa.Engine) -> None:
    """What was committed before the claim, or after the end, does not count."""
    changes = Changes()
    run(engine, INSERT)
    with noting(changes):
        run(engine, SELECT)
    run(engine, INSERT)
    assert not changes.committed


def test_blocks_within_blocks(engine: sa.Engine) -> None:
    """A commit belongs to the innermost block, and after that block to the outer one again."""
    outer, inner = Changes(), Changes()
    with noting(outer):
        with suppress(ZeroDivisionError), noting(inner):
            run(engine, INSERT)
            raise ZeroDivisionError
        assert (False, True) == (outer.committed, inner.committed)
        run(engine, INSERT)
    assert outer.committed


def test_a_block_that_ends_in_another_context() -> None:
    """A block may begin in one context and end in another, as a generator's does."""
    block = noting(Changes())
    copy_context().run(block.__enter__)
    copy_context().run(block.__exit__, None, None, None)
    assert module._changes() is None


def test_threads_do_not_mix(engine: sa.Engine) -> None:
    """Each of many threads sees its own commits alone."""
    all_changes = [Changes() for _ in range(8)]

    def work(number: int) -> None:
        with noting(all_changes[number]):
            for _ in range(5):
                run(engine, SELECT if number % 2 else "UPDATE charge SET amount = 1 WHERE id = 0")

    together(8, work)
    assert ["UPDATE charge (and 4 more)", ""] * 4 == [changes.seen for changes in all_changes]


def test_a_thread_with_the_requests_context(engine: sa.Engine) -> None:
    """Where the context is another but the request is the same, the changes in its environ are found."""
    changes = Changes()
    with Flask("shop").test_request_context(environ_overrides={ENVIRON: changes}):
        background(copy_current_request_context(run), engine, INSERT).result(10)
        assert request.environ[ENVIRON].seen == "INSERT INTO charge"


def test_the_context_comes_before_the_environ(engine: sa.Engine, changes: Changes) -> None:
    """Where both are there, the block's changes are taken."""
    other = Changes()
    with Flask("shop").test_request_context(environ_overrides={ENVIRON: other}):
        run(engine, INSERT)
    assert (True, False) == (changes.committed, other.committed)


def test_a_request_without_changes(engine: sa.Engine) -> None:
    """In a request that is not guarded, and outside of any, nothing happens but what the app asked for."""
    with Flask("shop").test_request_context():
        run(engine, INSERT)
    with engine.connect() as connection:
        assert 2 == connection.scalar(sa.select(sa.func.count()).select_from(Charge))


# Commits that fail


def test_a_commit_that_is_refused(engine: sa.Engine, changes: Changes) -> None:
    """A commit that a deferred constraint refuses has committed nothing, and later ones of the connection count."""
    with engine.connect() as connection:
        connection.exec_driver_sql(DANGLING)
        with pytest.raises(sa.exc.IntegrityError):
            connection.commit()
        assert not changes.committed
        with suppress(sa.exc.DBAPIError):
            connection.rollback()
    run(engine, SELECT)
    assert not changes.committed
    run(engine, INSERT)
    assert "INSERT INTO charge" == changes.seen


def test_only_the_refused_commit_is_taken_back(engine: sa.Engine, changes: Changes) -> None:
    """A commit before the one that is refused stays."""
    run(engine, "UPDATE charge SET amount = 4242")
    with pytest.raises(sa.exc.IntegrityError):
        run(engine, DANGLING)
    assert "UPDATE charge" == changes.seen


def test_an_error_after_a_commit(engine: sa.Engine, changes: Changes) -> None:
    """A statement that fails in the next transaction takes nothing back."""
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        connection.commit()
        with pytest.raises(sa.exc.IntegrityError):
            connection.exec_driver_sql(FAILING)
    assert changes.committed


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_serialization_failure(postgres_url: str, changes: Changes, isolation: Any) -> None:
    """A transaction that the database gives up for another one has committed nothing."""
    watch()
    engine = make_engine(postgres_url, isolation_level=isolation)
    with engine.connect() as mine, engine.connect() as other, noting(changes):
        for connection in (mine, other):
            connection.exec_driver_sql("SELECT sum(amount) FROM charge")
            connection.exec_driver_sql(INSERT)
        with noting(None):
            other.exec_driver_sql("UPDATE charge SET amount = 2 WHERE id = 1")
            other.commit()
        with pytest.raises(sa.exc.OperationalError):
            mine.exec_driver_sql("UPDATE charge SET amount = 3 WHERE id = 1")
        mine.rollback()
    assert not changes.committed


def test_a_busy_commit(sqlite_url: str, changes: Changes) -> None:
    """A transaction that SQLite was too busy to commit counts for the next user of its connection, if it is kept.

    SQLAlchemy gives such a connection back as it is when the app closes it without a rollback.
    """
    watch()
    engine = make_engine(sqlite_url, connect_args={"timeout": 0})
    with closing(sqlite3.connect(engine.url.database or "")) as reader, engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        cursor = reader.execute("SELECT * FROM charge UNION ALL SELECT * FROM charge")
        cursor.fetchone()
        with pytest.raises(sa.exc.OperationalError):
            connection.commit()
        cursor.close()
    assert not changes.committed
    run(engine, SELECT)
    with engine.connect() as connection:
        rows = connection.scalar(sa.select(sa.func.count()).select_from(Charge))
    assert (rows == 2) == changes.committed


@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_commit_whose_reply_is_lost(
    tcp_engine: sa.Engine, cutting_proxy: CuttingProxy, changes: Changes, lose: str
) -> None:
    """A commit that nobody knows the outcome of may have been carried out, so it counts."""
    rule = getattr(cutting_proxy, lose)("COMMIT")
    with pytest.raises(sa.exc.DBAPIError):
        run(tcp_engine, INSERT)
    assert (1, True) == (rule.count, changes.committed)


def test_a_write_whose_reply_is_lost(tcp_engine: sa.Engine, cutting_proxy: CuttingProxy, changes: Changes) -> None:
    """A transaction whose connection breaks before its commit has committed nothing."""
    cutting_proxy.lose_reply("INSERT")
    with pytest.raises(sa.exc.DBAPIError):
        run(tcp_engine, INSERT)
    run(tcp_engine, SELECT)
    assert not changes.committed


def test_a_write_that_fails_half_way(sqlite_url: str, changes: Changes) -> None:
    """What a failed write has left in its transaction (SQLite's OR FAIL keeps rows) counts when that commits."""
    watch()
    engine = make_engine(sqlite_url)
    with engine.connect() as connection:
        with pytest.raises(sa.exc.IntegrityError):
            connection.exec_driver_sql("INSERT OR FAIL INTO charge (id, amount) VALUES (50, 1), (1, 2)")
        connection.commit()
        assert 1 == connection.scalar(sa.select(Charge.amount).where(Charge.id == 50))
    assert "INSERT OR FAIL INTO charge" == changes.seen


@pytest.mark.parametrize("error", [OSError, TimeoutError, SystemExit])
def test_a_commit_that_is_interrupted(sqlite_url: str, changes: Changes, error: type[BaseException]) -> None:
    """What is no error of the database, as a worker's time-out in the driver, leaves the commit's outcome open."""

    class Interrupted(sqlite3.Connection):
        def commit(self) -> None:
            super().commit()
            raise error

    watch()
    make_engine(sqlite_url).dispose()
    engine = sa.create_engine(sqlite_url, connect_args={"factory": Interrupted})
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        with pytest.raises(error):
            connection.commit()
    assert changes.committed


# Transactions by hand, and in two phases


def test_a_commit_by_hand(engine: sa.Engine, changes: Changes) -> None:
    """COMMIT as a statement counts if something was written."""
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
        with suppress(sa.exc.OperationalError):  # SQLite has not begun
            connection.exec_driver_sql("COMMIT")
        assert not changes.committed
        connection.exec_driver_sql(INSERT)
        connection.exec_driver_sql("COMMIT")
        assert changes.committed


def test_a_rollback_by_hand(engine: sa.Engine, changes: Changes) -> None:
    """ROLLBACK as a statement forgets what was written."""
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql(SELECT)
        connection.commit()
    assert not changes.committed


def test_a_commit_by_hand_whose_reply_is_lost(
    tcp_engine: sa.Engine, cutting_proxy: CuttingProxy, changes: Changes
) -> None:
    """COMMIT as a statement counts too when nobody knows whether it was carried out."""
    cutting_proxy.lose_reply("COMMIT")
    with tcp_engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        with pytest.raises(sa.exc.DBAPIError):
            connection.exec_driver_sql("COMMIT")
    assert changes.committed


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_write_after_an_end_by_hand(postgres_server: Postgres, postgres_database: str, driver: str, end: str) -> None:
    """After a COMMIT or ROLLBACK by hand a write counts where it stays: psycopg2 begins no transaction for it."""
    watch()
    changes = Changes()
    engine = make_engine(postgres_server.url(postgres_database, driver))
    with noting(changes), engine.connect() as connection:
        connection.exec_driver_sql(SELECT)
        connection.exec_driver_sql(end)
        connection.exec_driver_sql(INSERT)
    with engine.connect() as connection:
        stays = connection.exec_driver_sql("SELECT count(*) FROM charge").scalar() == 2
    engine.dispose()
    assert (driver == "psycopg2", stays) == (stays, changes.committed)


def test_a_commit_by_hand_that_is_refused(engine: sa.Engine, changes: Changes) -> None:
    """COMMIT as a statement does not count when a deferred constraint refuses it."""
    with engine.connect() as connection:
        connection.exec_driver_sql(DANGLING)
        with pytest.raises(sa.exc.IntegrityError):
            connection.exec_driver_sql("COMMIT")
        connection.rollback()
    assert not changes.committed


def test_several_statements_in_one(postgres_url: str, changes: Changes) -> None:
    """A write and its COMMIT in one text count, also if a later statement of the text fails."""
    watch()
    engine = make_engine(postgres_url)
    with pytest.raises(sa.exc.IntegrityError), engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT 1; {INSERT}; COMMIT; {FAILING}")
    assert changes.committed


@pytest.fixture(scope="module")
def two_phase_server() -> Iterator[Postgres]:
    """A server that prepares transactions."""
    server = Postgres({"max_prepared_transactions": "4"})
    yield server
    server.stop()


@pytest.mark.parametrize("prepare", [False, True])
def test_two_phases(two_phase_server: Postgres, driver: str, changes: Changes, prepare: bool) -> None:
    """In two phases, the first that keeps the writes beyond the connection counts: prepare, or a direct commit."""
    watch()
    name = two_phase_server.create_database()
    engine = make_engine(two_phase_server.url(name, driver))
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.exec_driver_sql(INSERT)
        if prepare:
            transaction.prepare()
            assert "INSERT INTO charge" == changes.seen
        transaction.commit()
    assert "INSERT INTO charge" == changes.seen
    engine.dispose()


def test_a_second_phase_that_is_refused(two_phase_server: Postgres, driver: str, changes: Changes) -> None:
    """What was prepared counts although its commit is refused: somebody else may have committed it."""
    watch()
    engine = make_engine(two_phase_server.url(two_phase_server.create_database(), driver))
    with engine.connect() as connection:
        transaction = connection.begin_twophase("one")
        connection.exec_driver_sql(INSERT)
        transaction.prepare()
        two_phase_server.execute("COMMIT PREPARED 'one'", database=str(engine.url.database))
        with pytest.raises(sa.exc.ProgrammingError):
            transaction.commit()
        connection.invalidate()
    assert "INSERT INTO charge" == changes.seen
    engine.dispose()


def test_two_phases_that_are_rolled_back(two_phase_server: Postgres, driver: str, changes: Changes) -> None:
    """A transaction for two phases that is rolled back before the first does not count."""
    watch()
    engine = make_engine(two_phase_server.url(two_phase_server.create_database(), driver))
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.exec_driver_sql(INSERT)
        transaction.rollback()
        connection.exec_driver_sql(SELECT)
        connection.commit()
    assert not changes.committed
    engine.dispose()


def test_an_error_in_the_next_of_two_phases(two_phase_server: Postgres, driver: str, changes: Changes) -> None:
    """A statement that fails in a transaction for two phases takes back no commit of the one before."""
    watch()
    engine = make_engine(two_phase_server.url(two_phase_server.create_database(), driver))
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        connection.commit()
        connection.begin_twophase()
        with pytest.raises(sa.exc.IntegrityError):
            connection.exec_driver_sql(FAILING)
    assert changes.committed
    engine.dispose()


def test_a_prepare_that_is_refused(postgres_url: str, changes: Changes) -> None:
    """A server that prepares no transactions has kept nothing."""
    watch()
    engine = make_engine(postgres_url)
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.exec_driver_sql(INSERT)
        with pytest.raises(sa.exc.DBAPIError):
            transaction.prepare()
        connection.invalidate()
    assert not changes.committed


# Autocommit


@pytest.fixture(params=["option", "engine option", "engine"])
def autocommit(request: pytest.FixtureRequest, engine: sa.Engine) -> sa.Engine:
    """The engine in the driver's autocommit mode, in each way to ask for it."""
    if request.param == "engine":
        return sa.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    if request.param == "engine option":
        return engine.execution_options(isolation_level="AUTOCOMMIT")
    sa.event.listen(engine, "engine_connect", lambda one: one.execution_options(isolation_level="AUTOCOMMIT"))
    return engine


def test_a_write_in_autocommit(autocommit: sa.Engine, changes: Changes) -> None:
    """In autocommit a write counts at once, and a read does not."""
    with autocommit.connect() as connection:
        connection.exec_driver_sql(SELECT)
        assert not changes.committed
        connection.exec_driver_sql(INSERT)
        assert "INSERT INTO charge" == changes.seen
        connection.rollback()
    assert "INSERT INTO charge" == changes.seen


def test_a_write_that_fails_in_autocommit(autocommit: sa.Engine, changes: Changes) -> None:
    """In autocommit a write that the database refuses does not count, then or at the commit."""
    with autocommit.connect() as connection:
        with pytest.raises(sa.exc.IntegrityError):
            connection.exec_driver_sql(FAILING)
        connection.commit()
    assert not changes.committed


def test_many_that_fail_in_autocommit(autocommit: sa.Engine, changes: Changes) -> None:
    """In autocommit some of many rows may stay when a later one is refused."""
    many = [{"id": 50, "amount": 1}, {"id": 1, "amount": 2}]
    with autocommit.connect() as connection, pytest.raises(sa.exc.IntegrityError):
        connection.execute(sa.text("INSERT INTO charge (id, amount) VALUES (:id, :amount)"), many)
    assert changes.committed


def test_a_procedure_that_fails_in_autocommit(postgres_url: str, changes: Changes) -> None:
    """In autocommit a block that commits and then fails has committed."""
    watch()
    engine = make_engine(postgres_url).execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(sa.exc.IntegrityError):
        connection.exec_driver_sql(f"DO $$ BEGIN {INSERT}; COMMIT; {FAILING}; END $$")
    assert changes.committed


def test_a_call_that_fails_in_autocommit(postgres_url: str, changes: Changes) -> None:
    """In autocommit a procedure that commits and then fails has committed."""
    watch()
    engine = make_engine(postgres_url).execution_options(isolation_level="AUTOCOMMIT")
    procedure = f"CREATE PROCEDURE p() LANGUAGE plpgsql AS $$ BEGIN {INSERT}; COMMIT; {FAILING}; END $$"
    with noting(None):
        run(engine, procedure)
    with pytest.raises(sa.exc.IntegrityError):
        run(engine, "CALL p()")
    assert "CALL p" == changes.seen


@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_write_in_autocommit_whose_reply_is_lost(
    tcp_engine: sa.Engine, cutting_proxy: CuttingProxy, changes: Changes, lose: str
) -> None:
    """In autocommit a write counts when nobody knows whether it was carried out."""
    getattr(cutting_proxy, lose)("INSERT")
    with pytest.raises(sa.exc.DBAPIError):
        run(tcp_engine.execution_options(isolation_level="AUTOCOMMIT"), INSERT)
    assert changes.committed


def test_autocommit_behind_sqlalchemys_back(postgres_server: Postgres, postgres_database: str, driver: str) -> None:
    """A driver's connection that an app has put into autocommit itself is known by its own attribute."""
    watch()
    changes = Changes()
    engine = make_engine(postgres_server.url(postgres_database, driver))
    engine.dispose()
    sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "autocommit", True))
    with noting(changes), engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        assert changes.committed
    engine.dispose()


@pytest.mark.parametrize("end", ["driver's cursor", "driver's commit", "after a rollback"])
def test_a_transaction_by_hand_in_autocommit(
    postgres_server: Postgres, postgres_database: str, driver: str, end: str
) -> None:
    """In autocommit a write counts at once in a transaction that was begun by hand: its end may be seen by nobody."""
    watch()
    changes = Changes()
    engine = make_engine(postgres_server.url(postgres_database, driver), pool_size=1)
    with noting(changes), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql(INSERT)
        if end == "driver's cursor":
            connection.connection.cursor().execute("COMMIT")
        elif end == "driver's commit":
            connection.connection.driver_connection.commit()  # type: ignore[union-attr]
        else:
            connection.rollback()  # of which psycopg2 sends nothing
            connection.exec_driver_sql("COMMIT")
    engine.dispose()
    assert "INSERT INTO charge" == changes.seen


@pytest.mark.parametrize("level", [None, "IMMEDIATE"])
def test_sqlite_without_the_drivers_transactions(sqlite_url: str, changes: Changes, level: str | None) -> None:
    """On SQLite it is what the driver says after the write that counts, in whatever mode it is."""
    watch()
    make_engine(sqlite_url).dispose()
    engine = sa.create_engine(sqlite_url, connect_args={"isolation_level": level})
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        assert (level is None) == changes.committed
        connection.commit()
    assert "INSERT INTO charge" == changes.seen


def test_sqlites_transactions_by_hand(sqlite_url: str, changes: Changes) -> None:
    """With the driver's transactions off and BEGIN by hand, a write counts at the commit."""
    watch()
    engine = make_engine(sqlite_url, connect_args={"isolation_level": None})
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        assert not changes.committed
        connection.commit()
    assert changes.committed


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has had the parameter since Python 3.12")
@pytest.mark.parametrize("mode", [True, False])
def test_sqlites_newer_modes(sqlite_url: str, changes: Changes, mode: bool) -> None:
    """With the driver's own autocommit on a write counts at once, and with it off at the commit."""
    watch()
    make_engine(sqlite_url).dispose()
    engine = sa.create_engine(sqlite_url, connect_args={"autocommit": mode})
    with engine.connect() as connection:
        connection.exec_driver_sql(INSERT)
        assert mode == changes.committed
        connection.commit()
    assert changes.committed


@pytest.mark.parametrize("how", ["option", "engine"])
def test_a_driver_that_does_not_tell(sqlite_url: str, changes: Changes, how: str) -> None:
    """Where the driver's connection does not say whether it is in a transaction, SQLAlchemy's setting does."""

    class Silent(sqlite3.Connection):
        in_transaction = None  # type: ignore[assignment]
        autocommit = None  # type: ignore[assignment]

    watch()
    make_engine(sqlite_url).dispose()
    settings = {"isolation_level": "AUTOCOMMIT"}
    engine = sa.create_engine(sqlite_url, connect_args={"factory": Silent}, **(settings if how == "engine" else {}))
    if how == "option":
        run(engine, INSERT)
        assert "INSERT INTO charge" == changes.seen
        with engine.connect() as connection:
            connection.exec_driver_sql(INSERT)
            assert "INSERT INTO charge" == changes.seen
    with engine.connect() as connection:
        connection.execution_options(**(settings if how == "option" else {})).exec_driver_sql(INSERT)
    assert ("INSERT INTO charge" if how == "engine" else "INSERT INTO charge (and 1 more)") == changes.seen


# Connections of the driver


def test_a_connection_of_the_driver(engine: sa.Engine, changes: Changes) -> None:
    """What was done on a driver's connection is not known, so it counts when it comes back to the pool."""
    with closing(engine.raw_connection()) as raw:
        raw.cursor().execute(INSERT)
        raw.commit()
        assert not changes.committed
    assert "a connection of the driver" == changes.seen
    run(engine, SELECT)
    assert "a connection of the driver" == changes.seen


def test_connections_of_sqlalchemy_are_no_drivers(engine: sa.Engine, changes: Changes) -> None:
    """A new connection, a used one, one that reconnects and one that is detached do not count by themselves."""
    for _ in range(2):
        with engine.connect() as connection:
            connection.exec_driver_sql(SELECT)
    with engine.connect() as connection:
        connection.exec_driver_sql(SELECT)
        connection.invalidate()
        connection.rollback()
        connection.exec_driver_sql(SELECT)
    with engine.connect() as connection:
        connection.invalidate()
        connection.exec_driver_sql(SELECT)
        connection.commit()
    with engine.connect() as connection:
        connection.detach()
        connection.exec_driver_sql(SELECT)
        connection.commit()
    assert not changes.committed


def test_a_detached_connection(engine: sa.Engine, changes: Changes) -> None:
    """A connection that has left its pool is watched like any other."""
    with engine.connect() as connection:
        connection.detach()
        connection.exec_driver_sql(INSERT)
        assert not changes.committed
        connection.commit()
    assert "INSERT INTO charge" == changes.seen


def test_connections_that_share_the_drivers(changes: Changes) -> None:
    """In memory one connection's commit commits what another wrote, and another's error takes no commit back."""
    watch()
    engine = make_engine("sqlite://", poolclass=sa.StaticPool)
    with engine.connect() as one, engine.connect() as two:
        two.exec_driver_sql(SELECT)
        one.exec_driver_sql(INSERT)
        one.exec_driver_sql(SELECT)
        assert not changes.committed
        two.commit()
        assert changes.committed
        with pytest.raises(sa.exc.IntegrityError):
            one.exec_driver_sql(FAILING)
        assert "INSERT INTO charge" == changes.seen


# The extension's own


@pytest.mark.parametrize("memory", [False, True])
def test_the_extensions_own_writes(engine: sa.Engine, changes: Changes, memory: bool) -> None:
    """A claim, its record and its release do not count, whether in autocommit, in transactions or in memory."""
    app = make_engine("sqlite://", poolclass=sa.StaticPool) if memory else engine
    store = SQLAlchemyStore(app, sa.MetaData())
    with noting(None):
        store.table.metadata.create_all(app)
    store.record(claimed(store, ask(key="key-0001")), ANSWER, 3600)
    store.release(claimed(store, ask(key="key-0002")))
    assert "" == changes.seen
    store.close()


def test_the_extensions_own_failures(cutting_proxy: CuttingProxy, tcp_engine: sa.Engine, changes: Changes) -> None:
    """A claim whose reply was lost does not count either."""
    store = SQLAlchemyStore(tcp_engine, sa.MetaData())
    with noting(None):
        store.table.metadata.create_all(tcp_engine)
        claimed(store, ask(key="warm-up"))
    rule = cutting_proxy.lose_reply("INSERT INTO")
    claimed(store, ask())
    assert (1, "") == (rule.count, changes.seen)
    store.close()


# Listening


def test_engines_from_before(database_url: str) -> None:
    """Engines, and connections that are open, are watched from the call on, failures of their commits included."""
    code = f"""
import sqlalchemy as sa
from flask_idempotency.changes import Changes, noting, watch
from tests.unit.test_changes import DANGLING, INSERT, make_engine
engine = make_engine({database_url!r})
derived = engine.execution_options(logging_token="one")
open_one = engine.connect()
watch()
for one in (engine, derived):
    changes = Changes()
    with noting(changes), one.begin() as connection:
        connection.exec_driver_sql(INSERT)
    assert changes.committed
changes = Changes()
with noting(changes):
    open_one.exec_driver_sql(INSERT)
    open_one.commit()
    assert "INSERT INTO charge" == changes.seen
    open_one.exec_driver_sql(DANGLING)
    try:
        open_one.commit()
    except sa.exc.IntegrityError:
        print(changes.seen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=os.getcwd())
    assert ("INSERT INTO charge\n", 0) == (done.stdout, done.returncode), done.stderr


def test_watching_twice(engine: sa.Engine, changes: Changes) -> None:
    """However many threads begin to watch, each write is seen once."""
    together(8, lambda _: watch())
    run(engine, INSERT)
    assert "INSERT INTO charge" == changes.seen


def test_a_forked_child(engine: sa.Engine, changes: Changes) -> None:
    """A child process watches on, and tells the parent nothing."""
    engine.dispose()
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            watch()
            run(engine, INSERT)
            status = 0 if changes.committed else 2
        os._exit(status)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert not changes.committed


def test_what_can_not_be_followed(
    engine: sa.Engine, changes: Changes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure while watching is logged and counts as a commit; the app's statement and commit are carried out."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "_info", fail)
    run(engine, INSERT)
    assert "what could not be followed" in changes.seen
    assert "could not be followed" in caplog.text
    with engine.connect() as connection:
        assert 2 == connection.scalar(sa.select(sa.func.count()).select_from(Charge))


def test_no_connection_is_kept(engine: sa.Engine, changes: Changes) -> None:
    """A connection that is dropped without being closed goes back to its pool at once, as it does unwatched."""
    connection = engine.connect()
    connection.exec_driver_sql(INSERT)
    connection.commit()
    reference = weakref.ref(connection)
    del connection
    assert (True, None) == (changes.committed, reference())


def test_threads_share_changes() -> None:
    """Commits of several threads of one request are all there."""
    changes = Changes()
    together(8, lambda _: [changes._add(module._Writes("INSERT INTO charge")) for _ in range(100)])
    assert "INSERT INTO charge (and 799 more)" == changes.seen
