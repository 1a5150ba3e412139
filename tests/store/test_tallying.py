"""Counts beside a key, and how many keys of a scope are kept, on every back end."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim, Stored
from flask_idempotency.errors import StoreError
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.store.survey import Counted, Counts
from flask_idempotency.store.table import COUNTS
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import app_engine, backend_of, execute, row, shift


def counts(store: SQLAlchemyStore, key: str) -> list[int | None]:
    """The counts of one key as they are stored."""
    found = row(store, key)
    return [getattr(found, name) for name in COUNTS]


def counted(key: str, *numbers: int, scope: str = "") -> Counted:
    return Counted(scope or ask().scope, key, Counts(*numbers))


def test_counts_add_up(store: SQLAlchemyStore) -> None:
    """Each write adds to what is there; keys that are gone, or of another scope, are passed over."""
    for number in range(12):
        store.record(claimed(store, ask(key=f"key-{number}")), ANSWER, 3600)
    assert [None] * 5 == counts(store, "key-0")
    gone = [counted("nothing", 1), counted("key-0", 9, 9, 9, 9, 9, scope="other")]
    store.count([counted(f"key-{number}", number, 1, 2, 3, 4) for number in range(12)] + gone)
    store.count([counted("key-1", 1, 1, 1, 1, 1)])
    assert [[0, 1, 2, 3, 4], [2, 2, 3, 4, 5], [11, 1, 2, 3, 4]] == [counts(store, f"key-{one}") for one in (0, 1, 11)]


def test_many_keys_at_once(sqlite_store: SQLAlchemyStore, postgres_store: SQLAlchemyStore) -> None:
    """More keys than one statement takes are counted all the same, each once."""
    for store in (sqlite_store, postgres_store):
        claimed(store, ask(key="key-7"))
        store.count([counted(f"key-{number}", 1) for number in range(1_201)])
        assert 1 == counts(store, "key-7")[0]


def test_what_is_locked_is_passed_over(postgres_store: SQLAlchemyStore) -> None:
    """A row that somebody's transaction has locked is not waited for, and the others are counted."""
    for key in ("key-a", "key-b"):
        claimed(postgres_store, ask(key=key))
    with app_engine(postgres_store).begin() as connection:
        table = postgres_store.table
        connection.execute(sa.select(table).where(table.c.key == "key-a").with_for_update())
        postgres_store.count([counted("key-a", 1), counted("key-b", 1)])
    assert [None, 1] == [counts(postgres_store, key)[0] for key in ("key-a", "key-b")]


def test_a_new_key_is_counted_from_nothing(store: SQLAlchemyStore) -> None:
    """Past its retention a key's counts are gone with it; a takeover and an answer leave them."""
    store.record(claimed(store, ask(key="key-a")), ANSWER, 3600)
    store.count([counted("key-a", 1)])
    shift(store, 3_601)
    asking = ask(key="key-a")
    found = store.find(asking.scope, asking.key)
    assert isinstance(found, Stored)
    claim = store.take(asking, found)
    assert isinstance(claim, Claim)
    assert [None] * 5 == counts(store, "key-a")
    store.count([counted("key-a", 0, 1)])
    store.record(claim, ANSWER, 3600)
    assert [0, 1, 0, 0, 0] == counts(store, "key-a")


def drop_counts(store: SQLAlchemyStore) -> None:
    """Make the table as release 0.4 has it."""
    for name in COUNTS:
        execute(store, f"ALTER TABLE {{table}} DROP COLUMN {name}")


def test_a_table_without_counts(store: SQLAlchemyStore) -> None:
    """Without the columns a key is new again as ever, and counting says to migrate; once they are there it counts."""
    drop_counts(store)
    store.record(claimed(store, ask(key="key-a")), ANSWER, 3600)
    with pytest.raises(StoreError, match="flask db migrate"):
        store.count([counted("key-a", 1)])
    shift(store, 3_601)
    asking = ask(key="key-a")
    found = store.find(asking.scope, asking.key)
    assert isinstance(found, Stored)
    assert isinstance(store.take(asking, found), Claim)
    for name in COUNTS:
        execute(store, f"ALTER TABLE {{table}} ADD COLUMN {name} INTEGER")
    store.count([counted("key-a", 1)])
    assert 1 == counts(store, "key-a")[0]
    backend = backend_of(store)
    assert not backend.shape.has_counts(backend.run)
    backend.shape._until = 0.0
    assert backend.shape.has_counts(backend.run)


def kept(store: SQLAlchemyStore, limit: int = 10) -> tuple[int, int]:
    """How many keys of the tests' scope are kept, and in how many seconds the first ends, rounded up."""
    found = store.kept(ask().scope, limit)
    return found.count, round(found.first_ends_in + 0.45)


def test_kept_keys(store: SQLAlchemyStore) -> None:
    """Keys count while they are kept, pruned or not; alive and held ones whatever their retention; others' never."""
    assert (0, 0) == kept(store)
    claimed(store, ask(key="live", retention=10, lock_timeout=9_000.0))
    assert store.hold(claimed(store, ask(key="held", retention=10)))
    assert (2, 0) == kept(store)
    for key, retention in (("a", 100.0), ("b", 200.0)):
        store.record(claimed(store, ask(key=key)), ANSWER, retention)
    claimed(store, ask(key="foreign", scope="other"))
    assert (4, 100) == kept(store)
    assert 3 == kept(store, 3)[0]
    shift(store, 150)
    assert (3, 50) == kept(store)
    shift(store, 150)
    assert (2, 0) == kept(store)
    execute(store, "UPDATE {table} SET lock_timeout = 1 WHERE {key} = :name", name=_stored(store, "live"))
    assert (1, 0) == kept(store)


def _stored(store: SQLAlchemyStore, key: str) -> Any:
    return key.encode() if app_engine(store).dialect.name == "mysql" else key
