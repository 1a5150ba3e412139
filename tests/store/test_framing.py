"""Atomic mode's frame on PostgreSQL: BEGIN, savepoints and COMMIT ride in messages that are sent anyway."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from flask_idempotency.claim import Claim, Stored
from flask_idempotency.store import SQLAlchemyStore, message
from flask_idempotency.store.framing import IDLE
from flask_idempotency.store.inside import Inside
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import app_engine, count, execute, opened, row, shift
from tests.support.proxy import CuttingProxy

LEFT = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in trans%'"


@pytest.fixture
def framed(postgres_store: SQLAlchemyStore) -> SQLAlchemyStore:
    """A store beside the app's own table."""
    execute(postgres_store, "DROP TABLE IF EXISTS charge")  # another test's
    execute(postgres_store, "CREATE TABLE charge (id serial PRIMARY KEY, key varchar(255))")
    return postgres_store


@pytest.fixture
def one(framed: SQLAlchemyStore) -> Iterator[Inside]:
    """An operation that has begun and is rolled back at the end, unless it was committed."""
    with framed.connect() as connection:
        inside = framed.inside(connection)
        inside.begin()
        yield inside
        inside.rollback()


def charge(session: Session, key: str = "1") -> None:
    """The app's work: one row."""
    session.execute(sa.text("INSERT INTO charge (key) VALUES (:key)"), {"key": key})


def session_of(one: Inside) -> Session:
    """The app's session as an atomic view has it."""
    return Session(bind=one._connection, join_transaction_mode="create_savepoint")


def charges(store: SQLAlchemyStore) -> list[str]:
    """The rows of the app's work."""
    return [key for (key,) in execute(store, "SELECT key FROM charge ORDER BY id")]


def granted(one: Inside) -> Claim:
    """The claim of an operation that is the first."""
    claim = one.enter(ask())
    assert isinstance(claim, Claim)
    return claim


def test_a_cursor_at_the_server(framed: SQLAlchemyStore, one: Inside) -> None:
    """A view reads with yield_per within the transaction, and its work is committed with the record."""
    claim = granted(one)
    with session_of(one) as session:
        charge(session)
        numbers = sa.text("SELECT generate_series(1, 100)")
        assert list(range(1, 101)) == list(session.scalars(numbers, execution_options={"yield_per": 10}))
        session.commit()
        charge(session, "2")
        session.rollback()
        charge(session, "3")
        session.commit()
    assert one.finish(claim, ask(), ANSWER, 3600)
    assert ["1", "3"] == charges(framed)
    assert 1 == count(framed)


def test_a_cursor_at_the_server_in_a_view_that_fails(framed: SQLAlchemyStore, one: Inside) -> None:
    """Nothing is left of a view that read with yield_per and was rolled back."""
    granted(one)
    with session_of(one) as session:
        charge(session)
        assert 100 == len(
            list(session.scalars(sa.text("SELECT generate_series(1, 100)").execution_options(yield_per=9)))
        )
        session.commit()
    one.rollback()
    assert ([], 0) == (charges(framed), count(framed))


@pytest.mark.each_driver
def test_a_cursor_at_the_server_after_a_failure(framed: SQLAlchemyStore, one: Inside) -> None:
    """Where a statement has failed, yield_per fails too; after a rollback the view goes on, and all of it is ended."""
    claim = granted(one)
    with session_of(one) as session:
        for statement, options in (("SELECT 1/0", {}), ("SELECT 1", {"yield_per": 5})):
            with pytest.raises(sa.exc.DBAPIError):
                session.execute(sa.text(statement), execution_options=options)
        session.rollback()
        charge(session)
        session.commit()
    assert one.finish(claim, ask(), ANSWER, 3600)
    assert ["1"] == charges(framed)


@pytest.mark.each_driver
def test_a_cursor_at_the_server_that_is_never_made(framed: SQLAlchemyStore) -> None:
    """Nothing is left of a transaction in which the driver refused the values of a yield_per."""
    with framed.connect() as connection:
        one = framed.inside(connection)
        one.begin()
        granted(one)
        values = {"execution_options": {"stream_results": True}}
        with pytest.raises((sa.exc.StatementError, KeyError)):
            one._connection.exec_driver_sql("SELECT %(missing)s", {"given": 1}, **values)
        one.rollback()
        driver: Any = connection.connection.dbapi_connection
        assert IDLE == driver.info.transaction_status


@pytest.mark.parametrize("event", ["connect", "checkout"])
def test_a_listener_that_leaves_a_transaction(postgres_url: str, driver: str, event: str) -> None:
    """Where the app's pool hands connections out with a transaction begun (by a SET), the driver ends it as ever."""
    url = sa.make_url(postgres_url).set(drivername=f"postgresql+{driver}").render_as_string(False)
    with opened(url, pool_size=1, max_overflow=0, pool_timeout=1) as store:
        execute(store, "CREATE TABLE charge (id serial PRIMARY KEY, key varchar(255))")
        sa.event.listen(app_engine(store), event, lambda made, *_: made.cursor().execute("SET app.tenant = 'one'"))
        for key in ("key-00000001", "key-00000002"):
            app_engine(store).dispose()
            with store.connect() as connection:
                one = store.inside(connection)
                one.begin()
                claim = one.enter(ask(key=key))
                assert isinstance(claim, Claim)
                with session_of(one) as session:
                    charge(session, key)
                    session.commit()
                assert one.finish(claim, ask(key=key), ANSWER, 3600)
        assert (["key-00000001", "key-00000002"], 2) == (charges(store), count(store))


def test_an_operation_that_nobody_ends(framed: SQLAlchemyStore) -> None:
    """Where the one who ran it is gone without a word, the pool ends the transaction and gives the driver back."""
    connection = framed.connect()
    one = framed.inside(connection)
    one.begin()
    granted(one)
    driver: Any = connection.connection.dbapi_connection
    with session_of(one) as session:
        charge(session)
        session.commit()
    del one, session
    connection.close()
    del connection
    gc.collect()
    assert ([], 0, False) == (charges(framed), count(framed), driver.autocommit)
    assert [(0,)] == execute(framed, LEFT)
    with framed.connect() as connection, connection.begin() as transaction:
        connection.execute(sa.text("INSERT INTO charge (key) VALUES ('undone')"))
        transaction.rollback()
    assert [] == charges(framed)


@pytest.mark.parametrize("known", [False, True])
def test_a_level_that_the_database_sets(postgres_url: str, known: bool) -> None:
    """Where the database makes transactions serializable, the row comes first, and outlives a view's rollback."""
    with opened(postgres_url) as store:
        execute(store, "CREATE TABLE charge (id serial PRIMARY KEY, key varchar(255))")
        (name,) = execute(store, "SELECT current_database()")[0]
        execute(store, f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
        app_engine(store).dispose()
        for number in range(1 + known):
            asking = ask(key=f"key-{number:08}")
            with store.connect() as connection:
                one = store.inside(connection)
                one.begin()
                claim = one.enter(asking)
                assert isinstance(claim, Claim)
                assert claim.id
                with session_of(one) as session:
                    charge(session)
                    session.rollback()
                    charge(session, "2")
                    session.commit()
                assert one.finish(claim, asking, ANSWER, 3600)
        assert ["2"] * (1 + known) == charges(store)
        assert 1 + known == count(store)


def test_a_takeover_outlives_a_views_rollback(framed: SQLAlchemyStore) -> None:
    """What took an abandoned claim over stays written, whatever the view rolls back."""
    claimed(framed, ask(token="gone"))
    shift(framed, 31)
    with framed.connect() as connection:
        one = framed.inside(connection)
        one.begin()
        found = one.enter(ask())
        assert isinstance(found, Stored)
        claim = one.take(ask(), found)
        assert claim is not None
        with session_of(one) as session:
            charge(session)
            session.rollback()
        assert one.finish(claim, ask(), ANSWER, 3600)
    assert ("completed", 2) == (row(framed).status, row(framed).attempts)


class Bang(BaseException):
    """What ends a worker, or a greenlet."""


def test_a_connection_that_was_left_in_the_middle(
    framed: SQLAlchemyStore, one: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a time-out or a kill comes while a reply is awaited, the app's pool does not get that connection back."""

    def killed(*_: Any) -> Any:
        raise Bang

    monkeypatch.setattr(message.Message, "_fetched", killed)
    with pytest.raises(Bang):
        one.enter(ask())
    assert one._connection.invalidated


def test_a_rival_at_the_end(framed: SQLAlchemyStore, one: Inside) -> None:
    """Where somebody in the default mode has got the key meanwhile, nothing of the operation is committed."""
    claim = granted(one)
    with session_of(one) as session:
        charge(session)
        session.commit()
    rival = claimed(framed, ask(token="rival"))
    assert not one.finish(claim, ask(), ANSWER, 3600)
    one.rollback()
    assert [] == charges(framed)
    assert framed.record(rival, ANSWER, 3600)


def test_savepoints_take_one_message(tcp_url: str, cutting_proxy: CuttingProxy) -> None:
    """The first savepoint costs no message, each further one a single message with the release of the one before."""
    with opened(tcp_url) as store, store.connect() as connection:
        one = store.inside(connection)
        one.begin()
        claim = granted(one)
        with cutting_proxy.counting() as statements, session_of(one) as session:
            for _ in range(3):
                session.execute(sa.text("SELECT 1"))
                session.commit()
        words = [" ".join(re.findall(r"(?:^|;\s*)(\w+)", text)) for text in statements]
        assert ["SELECT", "RELEASE SAVEPOINT", "SELECT", "RELEASE SAVEPOINT", "SELECT"] == words
        assert one.finish(claim, ask(), ANSWER, 3600)
