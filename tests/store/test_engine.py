"""The store's own connections: made as the app's are, and never the app's."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from flask_idempotency.claim import Claim, Stored
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, backend_of, execute, opened, shift
from tests.support.apps import until
from tests.support.barrier import together
from tests.support.postgres import PgBouncer, Postgres


def first_run(store: SQLAlchemyStore, key: str = "key-00000001") -> None:
    """A claim and its record."""
    assert store.record(claimed(store, ask(key=key)), ANSWER, 3600)


def test_nothing_is_opened_before_the_first_call(postgres_server: Postgres, postgres_url: str) -> None:
    """Making and preparing a store opens no connection, and asks for the engine no sooner than it has to."""
    asked = []

    def engine() -> sa.Engine:
        asked.append(True)
        return made

    made = sa.create_engine(postgres_url)
    store = SQLAlchemyStore(engine, sa.MetaData())
    assert not asked
    store.prepare()
    assert store.separate
    assert len(asked) == 1
    assert postgres_server.sessions(str(made.url.database)) == []


@pytest.mark.scenario(16)
def test_the_apps_pool_is_not_used(database_url: str) -> None:
    """With every connection of the app's pool in use, and writes pending on PostgreSQL, the store works on."""
    engine = sa.create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    store = SQLAlchemyStore(engine, sa.MetaData())
    store.table.metadata.create_all(engine)
    with Session(engine) as session:
        session.execute(sa.select(store.table))
        if engine.dialect.name == "postgresql":
            session.execute(sa.text("CREATE TABLE pending (n integer)"))
        first_run(store)
        assert session.in_transaction()
        session.rollback()
    assert not sa.inspect(engine).has_table("pending")
    assert stored(store, ask()).recorded == ANSWER
    store.close()
    engine.dispose()


def test_no_more_connections_than_allowed(postgres_server: Postgres, postgres_url: str) -> None:
    """However many threads call, the server sees no more than ``pool_size`` connections, all idle between calls."""
    engine = sa.create_engine(postgres_url, poolclass=sa.NullPool)
    store = SQLAlchemyStore(engine, sa.MetaData(), pool_size=2)
    store.table.metadata.create_all(engine)
    together(8, lambda number: first_run(store, f"key-{number}"))
    states = [state for _, state, _ in postgres_server.sessions(str(engine.url.database))]
    assert states in (["idle"], ["idle", "idle"])
    store.close()


@pytest.mark.parametrize("pool", [sa.QueuePool, sa.NullPool, sa.StaticPool, sa.AssertionPool])
def test_every_kind_of_pool(postgres_url: str, pool: type[sa.Pool]) -> None:
    """Whatever pool the app has, its settings, its ways to connect and its listeners serve the store too."""
    engine = sa.create_engine(postgres_url, poolclass=pool, connect_args={"application_name": "the app"})

    def connected(connection: Any, record: Any) -> None:
        # Without a commit, as many apps do it.
        connection.cursor().execute("SET work_mem = '1234kB'")

    sa.event.listen(engine, "connect", connected)
    store = SQLAlchemyStore(engine, sa.MetaData())
    store.table.metadata.create_all(engine)
    first_run(store)
    with backend_of(store).run._own.connect() as connection:
        assert connection.execute(sa.text("SHOW work_mem")).scalar() == "1234kB"
        assert connection.execute(sa.text("SHOW application_name")).scalar() == "the app"
    store.close()
    engine.dispose()


def test_an_apps_own_creator(postgres_server: Postgres, postgres_database: str) -> None:
    """An engine whose connections are made by a function of the app's serves, too."""
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: postgres_server.connect(postgres_database))
    store = SQLAlchemyStore(engine, sa.MetaData())
    store.table.metadata.create_all(engine)
    first_run(store)
    store.close()
    engine.dispose()


@pytest.mark.parametrize("level", ["SERIALIZABLE", "AUTOCOMMIT"])
def test_the_apps_isolation_level(database_url: str, level: str) -> None:
    """The isolation level of the app's engine is its own affair."""
    with opened(database_url, isolation_level=level) as store:
        first_run(store)
        assert stored(store, ask()).recorded == ANSWER


@pytest.mark.scenario(67)
def test_a_schema_for_each_app(postgres_server: Postgres, postgres_url: str) -> None:
    """Schemas of the metadata, and their translation by the app's engine, are honoured."""
    postgres_server.execute("CREATE SCHEMA blue", database=str(sa.make_url(postgres_url).database))
    engine = sa.create_engine(postgres_url, execution_options={"schema_translate_map": {"api": "blue"}})
    store = SQLAlchemyStore(engine, sa.MetaData(schema="api"))
    store.table.metadata.create_all(engine)
    first_run(store)
    assert sa.inspect(engine).has_table("idempotency_keys", schema="blue")
    store.close()
    engine.dispose()


@pytest.mark.scenario(23)
def test_behind_a_transaction_pooling_proxy(pgbouncer: PgBouncer, postgres_database: str, driver: str) -> None:
    """Behind PgBouncer with two server connections many threads' calls all succeed, on both drivers."""
    with opened(pgbouncer.url(postgres_database, driver)) as store:

        def ten(number: int) -> None:
            for turn in range(10):
                first_run(store, f"key-{number}-{turn}")

        together(8, ten)
        assert all(isinstance(store.claim(ask(key=f"key-{n}-9")), Stored) for n in range(8))


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_time_zones_change_nothing(database_url: str, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the process's TZ nor the zones of the sessions that wrote and read a time shift it."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        with opened(database_url) as store:
            if app_engine(store).dialect.name == "postgresql":
                execute(store, f"ALTER DATABASE {app_engine(store).url.database} SET timezone = '{zone}'")
            claim = claimed(store, ask(lock_timeout=60.0))
            execute(store, "SELECT 1")
            app_engine(store).dispose()
            store.close()
            found = stored(store, ask())
            assert (found.stale, found.expired) == (False, False)
            assert 0 <= found.age_seconds < 30
            shift(store, 61)
            assert stored(store, ask()).stale
            assert store.record(claim, ANSWER, 3600)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.each_driver
def test_a_change_of_the_clocks_is_no_time(driver: str, postgres_url: str, portable: bool) -> None:
    """A lease and an age that span a change to or from summer time are as long as they were."""
    url = sa.make_url(postgres_url).set(drivername=f"postgresql+{driver}")
    zone, now = ZoneInfo("America/New_York"), datetime.now(timezone.utc)
    shifts = ((days, (now - timedelta(days)).astimezone(zone).utcoffset()) for days in range(2, 366))
    age = next(days for days, offset in shifts if offset != now.astimezone(zone).utcoffset()) * 86_400
    with opened(url.render_as_string(False), portable=portable) as store:
        execute(store, f"ALTER DATABASE {url.database} SET timezone = '{zone}'")
        app_engine(store).dispose()
        for lease, over in ((age - 1800, True), (age + 1800, False)):
            claimed(store, ask(key=f"key-{over}", lock_timeout=lease))
            execute(store, "UPDATE {table} SET locked_at = locked_at - :age * interval '1 second'", age=age)
            found = stored(store, ask(key=f"key-{over}"))
            assert over is found.stale
            assert age <= found.age_seconds < age + 60
            execute(store, "DELETE FROM {table}")


@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres, MDY"])
@pytest.mark.each_driver
def test_a_style_of_dates_changes_nothing(driver: str, postgres_url: str, style: str) -> None:
    """Keys are claimed, recorded and found whatever style the database shows its times in."""
    url = sa.make_url(postgres_url).set(drivername=f"postgresql+{driver}").render_as_string(False)
    with opened(url) as store:
        execute(store, f"ALTER DATABASE {app_engine(store).url.database} SET datestyle = '{style}'")
        app_engine(store).dispose()
        first_run(store)
        assert ANSWER == stored(store, ask()).recorded


@pytest.mark.parametrize("options", [{"paramstyle": "format"}, {"label_length": 9}, {"max_identifier_length": 20}])
@pytest.mark.each_driver
def test_an_engine_with_names_of_its_own(driver: str, postgres_url: str, options: dict[str, Any]) -> None:
    """Where SQLAlchemy was told to spell parameters otherwise, or to shorten names, keys are kept all the same."""
    url = sa.make_url(postgres_url).set(drivername=f"postgresql+{driver}").render_as_string(False)
    with opened(url, **options) as store:
        first_run(store)
        assert ANSWER == stored(store, ask()).recorded
        with store.connect() as connection:
            inside = store.inside(connection)
            inside.begin()
            claim = inside.enter(ask(key="key-2"))
            assert isinstance(claim, Claim)
            assert inside.finish(claim, ask(key="key-2"), ANSWER, 3600)
            inside.begin()
            found = inside.enter(ask(key="key-2"))
            assert isinstance(found, Stored)
            assert ANSWER == found.recorded
            inside.rollback()


@pytest.mark.parametrize("end", ["'infinity'", "now() + interval '9000 years'"])
@pytest.mark.each_driver
def test_a_record_that_is_kept_for_good(postgres_store: SQLAlchemyStore, end: str) -> None:
    """A retention whose end Python has no date for is not over."""
    first_run(postgres_store)
    execute(postgres_store, f"UPDATE {{table}} SET expires_at = {end}")
    assert not stored(postgres_store, ask()).expired


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.scenario(65)
def test_a_fork_uses_connections_of_its_own(database_url: str) -> None:
    """A forked child, and its parent, go on without noticing each other: no connection is shared, none is closed."""
    with opened(database_url) as store:
        first_run(store)
        for number in range(3):
            pid = os.fork()
            if pid == 0:
                try:
                    first_run(store, f"child-{number}")
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            first_run(store, f"parent-{number}")
            assert os.waitpid(pid, 0)[1] == 0
        for number in range(3):
            assert stored(store, ask(key=f"child-{number}")).recorded == ANSWER
            assert stored(store, ask(key=f"parent-{number}")).recorded == ANSWER


def test_a_closed_store_opens_again(store: SQLAlchemyStore) -> None:
    """Closing gives the connections up; the next call makes new ones."""
    store.close()
    assert isinstance(store.claim(ask()), Claim)
    store.close()
    assert isinstance(store.claim(ask()), Stored)


def test_disposing_of_the_apps_engine(postgres_server: Postgres, postgres_url: str) -> None:
    """Whoever disposes of the app's engine, to drop the database perhaps, finds nobody connected any more."""
    with opened(postgres_url) as store:
        first_run(store)
        assert postgres_server.sessions(str(app_engine(store).url.database))
        app_engine(store).dispose()
        until(lambda: not postgres_server.sessions(str(app_engine(store).url.database)))
        assert isinstance(store.claim(ask()), Stored)


def test_large_bodies(store: SQLAlchemyStore) -> None:
    """A body of the largest size that the table is meant for comes back whole."""
    body = os.urandom(1024 * 1024)
    assert store.record(claimed(store, ask()), Recorded(200, (), body), 3600)
    found = stored(store, ask()).recorded
    assert found is not None
    assert found.body == body
