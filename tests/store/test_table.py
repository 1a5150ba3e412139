"""The table, as metadata, databases and migrations see it."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from sqlalchemy.exc import IntegrityError

from flask_idempotency.errors import ConfigurationError
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.store.table import build_table
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import app_engine
from tests.support.barrier import together

COLUMNS = (
    "id scope key request_method request_path request_fingerprint fingerprint_version status fencing_token attempts "
    "steps response_status response_headers response_body locked_at lock_timeout stale_policy secret_id expires_at "
    "completed_at created_at updated_at replays conflicts mismatches early_replays late_replays"
)
CONVENTION = {"ix": "index_of_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"}
#: Needs every index to have a name already.
EXPLICIT = {"ix": "ix_%(constraint_name)s"}


def test_the_columns() -> None:
    """The table has the documented columns, in their order."""
    assert [column.name for column in build_table(sa.MetaData()).c] == COLUMNS.split()


@pytest.mark.scenario(60)
def test_scope_and_key_are_unique(store: SQLAlchemyStore) -> None:
    """The database itself refuses a second row for one scope and key, whoever writes it."""
    claimed(store, ask())
    engine = app_engine(store)
    columns = [column for column in store.table.c if column.name != "id"]
    copy = sa.insert(store.table).from_select([column.name for column in columns], sa.select(*columns))
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(copy)


@pytest.mark.scenario(67)
@pytest.mark.parametrize("schema", [None, "api"])
def test_a_migration_is_needed_once(database_url: str, schema: str | None) -> None:
    """The first migration has types of SQLAlchemy alone, and after it there is nothing left to migrate."""
    if schema is not None and database_url.startswith("sqlite"):
        pytest.skip("SQLite has no schemas")
    engine = sa.create_engine(database_url)
    metadata = sa.MetaData(schema=schema)
    build_table(metadata)
    with engine.begin() as connection:
        if schema is not None:
            connection.execute(sa.schema.CreateSchema(schema))
        context = MigrationContext.configure(connection, opts={"compare_type": True, "include_schemas": bool(schema)})
        upgrade = produce_migrations(context, metadata).upgrade_ops
        assert upgrade is not None
        script = render_python_code(upgrade)
        assert "flask_idempotency" not in script
        metadata.create_all(connection)
        assert compare_metadata(context, metadata) == []
    engine.dispose()


@pytest.mark.scenario(67)
@pytest.mark.parametrize("convention", [None, CONVENTION, {"pk": "pk_%(table_name)s"}, EXPLICIT])
def test_naming_conventions(sqlite_url: str, convention: dict[str, Any] | None) -> None:
    """Indexes are named by the metadata's convention where it has a rule for them, and have names in any case."""
    metadata = sa.MetaData(naming_convention=convention)
    table = build_table(metadata, "keys")
    engine = sa.create_engine(sqlite_url)
    metadata.create_all(engine)
    found = {str(index["name"]): bool(index["unique"]) for index in sa.inspect(engine).get_indexes("keys")}
    engine.dispose()
    expected = {"ix_keys_scope": True, "ix_keys_expires_at": False}
    if convention is CONVENTION:
        expected = {"index_of_keys_scope_key": True, "index_of_keys_expires_at": False}
    elif convention is EXPLICIT:
        expected = {"ix_ix_keys_scope": True, "ix_ix_keys_expires_at": False}
    assert found == expected
    assert len(table.indexes) == 2


@pytest.mark.scenario(67)
@pytest.mark.parametrize("schema", [None, "api"])
def test_a_table_of_the_same_name_is_reused(schema: str | None) -> None:
    """Many apps over one metadata share one table, also when they are built at once."""
    metadata = sa.MetaData(schema=schema)
    tables = together(8, lambda _: build_table(metadata))
    assert {id(table) for table in tables} == {id(tables[0])}
    assert len(tables[0].indexes) == 2


def test_another_table_of_the_same_name_is_refused() -> None:
    """A table of the app's own under that name is an error that names what is missing and the remedy."""
    metadata = sa.MetaData()
    sa.Table("idempotency_keys", metadata, sa.Column("id", sa.Integer), sa.Column("key", sa.String))
    with pytest.raises(ConfigurationError, match=r"scope, request_method.*IDEMPOTENCY_TABLE_NAME"):
        build_table(metadata)


def test_nothing_stored_is_null(store: SQLAlchemyStore) -> None:
    """What is not there is SQL's NULL in every column, the JSON ones too."""
    claim = claimed(store, ask())

    def nulls(*names: str) -> int:
        conditions = [sa.type_coerce(store.table.c[name], sa.String).is_(None) for name in names]
        with app_engine(store).connect() as connection:
            return int(connection.scalar(sa.select(sa.func.count()).where(*conditions)) or 0)

    answer = ("response_headers", "response_body")
    assert nulls("steps", "secret_id", "response_status", "completed_at", *answer) == 1
    assert store.record(claim, ANSWER, 3600)
    assert nulls("steps", "secret_id") == 1
    assert store.record(claim, ANSWER.without_answer(), 3600)
    assert nulls(*answer) == 1
