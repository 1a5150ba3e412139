"""Errors that a person has to mend, and what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim, Status, Stored
from flask_idempotency.errors import ConfigurationError, StoreError
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import app_engine, backend_of, count, execute, opened
from tests.support.barrier import together
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy

CLAIM = Claim(1, "tenant-1", "key-00000001", "0" * 32, 30.0)
SEEN = Stored(
    "tenant-1", "key-00000001", Status.HELD, "0" * 32, "POST", "/", "f" * 64, 1, 1, "reexecute", False, False, 1.0
)
CALLS: dict[str, Callable[[SQLAlchemyStore], object]] = {
    "claim": lambda store: store.claim(ask()),
    "record": lambda store: store.record(CLAIM, ANSWER, 3600),
    "release": lambda store: store.release(CLAIM),
    "hold": lambda store: store.hold(CLAIM),
    "resume": lambda store: store.resume(CLAIM),
    "keep_steps": lambda store: store.keep_steps(CLAIM, {}),
    "note_secret": lambda store: store.note_secret(CLAIM, "secret-1"),
    "settle": lambda store: store.settle(SEEN, ANSWER, 3600, "1" * 32),
    "free": lambda store: store.free(SEEN, 3600, "1" * 32),
    "renew": lambda store: store.renew([CLAIM]),
    "find": lambda store: store.find("tenant-1", "key-00000001"),
    "prunable": lambda store: store.prunable(),
    "prune": lambda store: store.prune(10),
}


@pytest.mark.scenario(68)
def test_a_missing_table(store: SQLAlchemyStore) -> None:
    """Without the table every call is an error that says to migrate, and with it all is well."""
    store.table.metadata.drop_all(app_engine(store))
    for call in CALLS.values():
        with pytest.raises(StoreError, match=r"flask db upgrade.*db.create_all\(\)") as caught:
            call(store)
        assert isinstance(caught.value.__cause__, sa.exc.SQLAlchemyError)
    store.table.metadata.create_all(app_engine(store))
    assert isinstance(store.claim(ask()), Claim)


@pytest.mark.scenario(68)
def test_a_missing_column(store: SQLAlchemyStore) -> None:
    """Nor with a table of before the last migration."""
    execute(store, "ALTER TABLE {table} DROP COLUMN lock_timeout")
    with pytest.raises(StoreError, match="flask db upgrade"):
        store.claim(ask())


@pytest.mark.scenario(60, 68)
def test_a_missing_index(postgres_store: SQLAlchemyStore, sqlite_store: SQLAlchemyStore) -> None:
    """Nor without the unique index: nothing else decides a race, so that no claim is granted."""
    for store in (postgres_store, sqlite_store):
        execute(store, f"DROP INDEX ix_{store.table.name}_scope")
        with pytest.raises(StoreError, match="flask db upgrade"):
            store.claim(ask())
        assert count(store) == 0


@pytest.mark.scenario(59)
def test_no_server(driver: str) -> None:
    """A database that can't be reached is a store error, with the driver's own words."""
    url = f"postgresql+{driver}://postgres@127.0.0.1:1/nowhere"
    store = SQLAlchemyStore(sa.create_engine(url, connect_args={"connect_timeout": 2}), sa.MetaData())
    with pytest.raises(StoreError, match=r"could not answer.*[Cc]onnection"):
        store.claim(ask())


@pytest.mark.scenario(59)
def test_a_server_that_takes_no_writes(postgres_server: Postgres, postgres_database: str, driver: str) -> None:
    """A replica is an error that says so; where a new connection leads to its successor, the call goes through."""
    replicas = [{"options": "-c default_transaction_read_only=on"}] * 3

    def lead(dialect: object, record: object, arguments: object, options: dict[str, str]) -> None:
        options.pop("options", None)  # an old SQLAlchemy hands out the same ones each time
        options.update(replicas.pop() if replicas else {})

    with opened(postgres_server.url(postgres_database, driver)) as store:
        sa.event.listen(app_engine(store), "do_connect", lead)
        with pytest.raises(StoreError, match=r"takes no writes.*read-only"):
            store.claim(ask())
        assert len(replicas) == 1  # the second one was a new connection, too
        store.close()
        assert isinstance(store.claim(ask()), Claim)
        assert replicas == []


@pytest.mark.scenario(59)
def test_a_hanging_server(tcp_url: str, cutting_proxy: CuttingProxy) -> None:
    """How long a server that doesn't answer is waited for is what the app's own engine says."""
    settings = {"connect_timeout": 1, "tcp_user_timeout": 500, "keepalives_idle": 1}
    with opened(tcp_url, connect_args=settings, pool_timeout=0.3, pool_size=1) as store:
        claimed(store, ask())
        app_engine(store).dispose()
        store.close()
        cutting_proxy.hang()
        with pytest.raises(StoreError):
            store.claim(ask())
        cutting_proxy.resume()
        assert isinstance(store.claim(ask()), Stored)


def test_a_pool_of_one(database_url: str) -> None:
    """One connection serves any number of threads, one after the other."""
    engine = sa.create_engine(database_url)
    store = SQLAlchemyStore(engine, sa.MetaData(), pool_size=1)
    store.table.metadata.create_all(engine)
    together(8, lambda number: store.record(claimed(store, ask(key=f"key-{number}")), ANSWER, 3600))
    assert count(store) == 8
    assert backend_of(store).run._own.pool.size() == 1
    store.close()
    engine.dispose()


def test_an_exhausted_pool(postgres_url: str) -> None:
    """When its own connections stay in use the error names the setting, after the app's own pool timeout."""
    engine = sa.create_engine(postgres_url, pool_timeout=0.1)
    store = SQLAlchemyStore(engine, sa.MetaData(), pool_size=1)
    store.table.metadata.create_all(engine)
    with backend_of(store).run._own.connect(), pytest.raises(StoreError, match="IDEMPOTENCY_POOL_SIZE"):
        store.claim(ask())
    assert isinstance(store.claim(ask()), Claim)
    store.close()
    engine.dispose()


def test_a_listener_that_fails(sqlite_url: str) -> None:
    """Whatever an app's own listener for new connections raises, the store has no answer, and says so."""
    engine = sa.create_engine(sqlite_url)

    def no_token(*_: object) -> None:
        raise ValueError("no token for a password")

    sa.event.listen(engine, "do_connect", no_token)
    store = SQLAlchemyStore(engine, sa.MetaData())
    for call in CALLS.values():
        with pytest.raises(StoreError, match="no token for a password") as caught:
            call(store)
        assert type(caught.value) is StoreError


def test_an_engine_that_can_not_be_had() -> None:
    """What the function that gives the engine says about the app's set-up is passed on."""

    def engine() -> sa.Engine:
        raise ConfigurationError("db.init_app(app) was forgotten")

    with pytest.raises(ConfigurationError, match="forgotten"):
        SQLAlchemyStore(engine, sa.MetaData()).prepare()


def test_answers_stay_out_of_messages(store: SQLAlchemyStore, caplog: pytest.LogCaptureFixture) -> None:
    """No message and no log of statements shows a recorded answer, or a key."""
    claim = claimed(store, ask())
    store.table.metadata.drop_all(app_engine(store))
    with caplog.at_level("INFO", logger="sqlalchemy.engine"), pytest.raises(StoreError) as caught:
        store.record(claim, ANSWER, 3600)
    for text in (str(caught.value), str(caught.value.__cause__), caplog.text):
        assert "/charges/1" not in text
        assert claim.token not in text
    store.table.metadata.create_all(app_engine(store))
