"""Rows that can't be read back: said so, never acted on, and no harm to other keys."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim
from flask_idempotency.errors import RowUnreadable, StoreError
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import RecordRefused, SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, execute, quoted, row

#: What a row may not hold, as an SQL expression for a column.
CORRUPT = [
    ("status", "'melted'"),
    ("status", "''"),
    ("fencing_token", "''"),
    ("attempts", "0"),
    ("attempts", "-1"),
    ("request_fingerprint", "''"),
    ("fingerprint_version", "-1"),
    ("stale_policy", "'perhaps'"),
    ("response_status", "NULL"),
    ("response_status", "0"),
    ("response_status", "1000"),
    ("response_headers", "NULL"),
    ("response_headers", "'{}'"),
    ("response_headers", "'7'"),
    ("response_headers", "'null'"),
    ("response_headers", "'[\"Location\"]'"),
    ("response_headers", "'[[\"Location\"]]'"),
    ("response_headers", "'[[\"Location\", 1]]'"),
    ("response_headers", '\'[["Location", "/", "/"]]\''),
    ("response_body", "NULL"),
    ("response_headers", '\'[[":body", "x 1 00"]]\', response_body = NULL'),
    ("response_headers", f'\'[[":body", "x -1 {64 * "0"}"]]\', response_body = NULL'),
    ("response_headers", f'\'[[":status", "OK"], [":body", "x 1 {64 * "0"}"]]\', response_body = NULL'),
    ("response_headers", "'[]', response_body = NULL"),
    ("response_headers", f'\'[["Location", "x 1 {64 * "0"}"]]\', response_body = NULL'),
    ("response_headers", f'\'[[":body", "x 1 {64 * "0"}"]]\''),
    ("completed_at", "NULL"),
]
#: What only SQLite lets in, whose columns have no types.
UNTYPED = [
    ("response_headers", "'[[\"Location\"'"),
    ("response_headers", "x'ff'"),
    ("response_body", "'text'"),
    ("response_status", "'many'"),
    ("attempts", "'many'"),
    ("attempts", "1.5"),
    ("request_method", "x'00'"),
    ("request_path", "CAST(x'ff' AS TEXT)"),
    ("expires_at", "''"),
    ("completed_at", "'2024-13-01 00:00:00'"),
    ("lock_timeout", "'long'"),
]


def corrupt(store: SQLAlchemyStore, key: str, column: str, value: str) -> None:
    """Meddle with one row."""
    engine = app_engine(store)
    with engine.begin() as connection:
        at_key = f"{quoted(engine, 'key')} = '{key}'"
        connection.exec_driver_sql(f"UPDATE {store.table.name} SET {column} = {value} WHERE {at_key}")


def check_unreadable(store: SQLAlchemyStore, key: str) -> None:
    """The key is neither new nor replayed, whoever asks, and other keys are as they ever were."""
    for call in (lambda: store.claim(ask(key=key)), lambda: store.find("tenant-1", key)):
        with pytest.raises(RowUnreadable) as caught:
            call()
        assert key not in str(caught.value)
    other = claimed(store, ask(key=f"beside-{key}"))
    assert store.renew([other]) == {other.token}
    assert store.record(other, ANSWER, 3600)
    assert stored(store, ask(key=f"beside-{key}")).recorded == ANSWER


def test_a_corrupt_row(store: SQLAlchemyStore) -> None:
    """A value that no version has written makes the row unreadable, which is an error of its own."""
    values = [*CORRUPT, *(UNTYPED if app_engine(store).dialect.name == "sqlite" else [])]
    for number, (column, value) in enumerate(values):
        key = f"{column}-{number}"
        store.record(claimed(store, ask(key=key)), ANSWER, 3600)
        corrupt(store, key, column, value)
        check_unreadable(store, key)


def test_a_lease_that_is_none(store: SQLAlchemyStore) -> None:
    """A claim whose lease can't be judged is neither alive for ever nor over."""
    values = [("lock_timeout", value) for value in ("0", "-1")]
    if app_engine(store).dialect.name == "sqlite":
        values += [("locked_at", "'yesterday'"), ("lock_timeout", "'long'")]
    elif app_engine(store).dialect.name == "postgresql":
        values += [("lock_timeout", value) for value in ("'NaN'", "'Infinity'")]
    for number, (column, value) in enumerate(values):
        key = f"{column}-{number}"
        claimed(store, ask(key=key))
        corrupt(store, key, column, value)
        check_unreadable(store, key)


def test_a_corrupt_row_is_not_pruned_as_another_one(store: SQLAlchemyStore) -> None:
    """A row of unknown status is left as it is, for whoever may know it."""
    store.record(claimed(store, ask()), ANSWER, 0)
    execute(store, "UPDATE {table} SET status = 'melted'")
    assert (store.prunable(), store.prune(10).count) == (0, 0)
    assert row(store).status == "melted"


@pytest.mark.scenario(57, 58)
def test_a_database_that_compares_inexactly(sqlite_url: str) -> None:
    """Where the database takes one key for another the answer is an error that names the remedy, not the other's."""
    engine = sa.create_engine(sqlite_url)
    metadata = sa.MetaData()
    store = SQLAlchemyStore(engine, metadata)
    store.table.c.key.type = sa.String(255, collation="NOCASE")
    metadata.create_all(engine)
    claimed(store, ask(key="key-0000000a"))
    with pytest.raises(RowUnreadable, match="binary collation"):
        store.claim(ask(key="KEY-0000000A"))
    assert isinstance(store.claim(ask(key="key-0000000b")), Claim)
    store.close()
    engine.dispose()


REFUSED = {
    "NUL in a header": Recorded(200, (("X-Note", "a\0b"),), b""),
    "lone surrogate in a header": Recorded(200, (("X-Note", "\ud800"),), b""),
    "NUL in a status text": Recorded(200, (), b"", "a\0b"),
    "status out of range": Recorded(2**40, (), b""),
    "body that is none": Recorded(200, (), object()),  # type: ignore[arg-type]
}


def test_an_answer_that_the_database_refuses(postgres_store: SQLAlchemyStore) -> None:
    """What PostgreSQL can't hold is an error of its own kind, after which the key can be completed without it."""
    for name, answer in REFUSED.items():
        claim = claimed(postgres_store, ask(key=name))
        with pytest.raises(RecordRefused):
            postgres_store.record(claim, answer, 3600)
        assert stored(postgres_store, ask(key=name)).token == claim.token
        assert postgres_store.record(claim, Recorded(200), 3600)
        assert stored(postgres_store, ask(key=name)).recorded == Recorded(200)


def test_a_key_that_the_database_refuses(postgres_store: SQLAlchemyStore) -> None:
    """A key that PostgreSQL can't hold is a store error, not a crash, and not a free key."""
    for asking in (ask(key="a\0b"), ask(scope="\ud800"), ask(key="k" * 256)):
        with pytest.raises(StoreError, match="hold a value"):
            postgres_store.claim(asking)


def test_headers_of_any_text_survive_on_sqlite(sqlite_store: SQLAlchemyStore) -> None:
    """Where the database can hold a strange header, it comes back as it was."""
    answer: Any = Recorded(200, (("X-Note", "a\0b\ud800"),), b"")
    assert sqlite_store.record(claimed(sqlite_store, ask()), answer, 3600)
    assert stored(sqlite_store, ask()).recorded == answer
