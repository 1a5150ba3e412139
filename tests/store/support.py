"""The table of back ends, and ways to meddle with the stored rows from outside."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from flask_idempotency.store import SQLAlchemyStore

TIMES = ("locked_at", "expires_at", "completed_at", "created_at", "updated_at")


@dataclass(frozen=True)
class BackEnd:
    """One way in which the store can be used. ``url`` is the name of the fixture that gives a database."""

    url: str
    portable: bool = False
    memory: bool = False


BACK_ENDS = {
    "sqlite-file": BackEnd("sqlite_url"),
    "sqlite-memory": BackEnd("memory_url", memory=True),
    "postgresql-psycopg2": BackEnd("shared_psycopg2_url"),
    "postgresql-psycopg3": BackEnd("shared_psycopg_url"),
    "mariadb": BackEnd("shared_mariadb_url"),
    "portable-sqlite": BackEnd("sqlite_url", portable=True),
    "portable-postgresql": BackEnd("shared_psycopg2_url", portable=True),
}


@contextmanager
def opened(url: str, *, portable: bool = False, memory: bool = False, **options: Any) -> Iterator[SQLAlchemyStore]:
    """A store with a table of its own, which stays behind in the database, and the app's engine of its own."""
    if memory:
        # As Flask-SQLAlchemy makes it.
        options.update(poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    engine = sa.create_engine(url, **options)
    metadata = sa.MetaData()
    name = f"keys_{secrets.token_hex(6)}"
    store = SQLAlchemyStore(engine, metadata, table_name=name, _portable=portable)
    metadata.create_all(engine, checkfirst=False)
    try:
        yield store
    finally:
        store.close()
        engine.dispose()


def app_engine(store: SQLAlchemyStore) -> sa.Engine:
    """The app's engine that the store was made with."""
    engine = store._engine
    assert isinstance(engine, sa.Engine)
    return engine


def backend_of(store: SQLAlchemyStore) -> Any:
    """The store's statements, and what runs them."""
    return store._ready()


def shift(store: SQLAlchemyStore, seconds: float) -> None:
    """Make all rows older by so many seconds."""
    engine = app_engine(store)
    if engine.dialect.name == "sqlite":
        # All that SQLite keeps of a time is its text.
        moved = ", ".join(
            f"{name} = strftime('%Y-%m-%d %H:%M:%f', {name}, '-{seconds} seconds') || '000'" for name in TIMES
        )
    else:
        interval = f"'{seconds} seconds'" if engine.dialect.name == "postgresql" else f"{seconds} SECOND"
        moved = ", ".join(f"{name} = {name} - INTERVAL {interval}" for name in TIMES)
    execute(store, f"UPDATE {{table}} SET {moved}")


def execute(store: SQLAlchemyStore, statement: str, **values: Any) -> list[Any]:
    """Carry out a statement on the app's engine and commit it; ``{table}`` is the store's table, ``{key}`` its key."""
    engine = app_engine(store)
    text = statement.format(table=store.table.fullname, key=quoted(engine, "key"))
    with engine.begin() as connection:
        result = connection.execute(sa.text(text), values)
        return list(result) if result.returns_rows else []


def quoted(engine: sa.Engine, name: str) -> str:
    """A name as the database wants it: KEY is a word of MySQL's own."""
    return engine.dialect.identifier_preparer.quote(name)


def row(store: SQLAlchemyStore, key: str = "key-00000001") -> Any:
    """One row as it is stored."""
    with app_engine(store).connect() as connection:
        table = backend_of(store).table
        return connection.execute(sa.select(table).where(table.c.key == key)).one()


def count(store: SQLAlchemyStore) -> int:
    """How many rows there are."""
    return int(execute(store, "SELECT count(*) FROM {table}")[0][0])
