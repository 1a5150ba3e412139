"""The table, as the app's metadata and its migrations see it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql

from ..errors import ConfigurationError

#: Two apps built at once over one metadata must not both find the table missing.
_building = threading.Lock()

#: Two dialects of SQLAlchemy, and one kind of database: a URL of the first may well lead to the second.
_MYSQL = ("mysql", "mariadb")

#: What IDEMPOTENCY_COUNT_REPLAYS counts. The second shape of the table: release 0.4 knows nothing of these columns and
#: leaves them alone; this one needs them for counting and for overviews alone, so that both run on either shape.
COUNTS = ("replays", "conflicts", "mismatches", "early_replays", "late_replays")


def build_table(metadata: sa.MetaData, name: str = "idempotency_keys") -> sa.Table:
    """The table of that name in ``metadata``: the one that is there, or a new one.

    Only types of SQLAlchemy itself are used, so that a migration needs nothing to import. A metadata's
    schema and naming convention are honoured.

    :raises ConfigurationError: a table of that name is there, and lacks columns other than those of the counts.
    """
    with _building:
        full_name = name if metadata.schema is None else f"{metadata.schema}.{name}"
        table = metadata.tables.get(full_name)
        if table is not None:
            return _checked(table)
        table = sa.Table(name, metadata, *_columns())
        sa.Index(_index_name(metadata, f"ix_{name}_scope"), table.c.scope, table.c.key, unique=True)
        sa.Index(_index_name(metadata, f"ix_{name}_expires_at"), table.c.expires_at)
        return table


def _columns() -> list[sa.Column[Any]]:
    # none_as_null: "nothing stored" is SQL's NULL, never JSON's null.
    jsonb: postgresql.JSONB[object] = postgresql.JSONB(none_as_null=True)
    # Unset, it stays out of migrations. Alembic writes it there as a bare Text(), which nothing imports, when the
    # migration is generated on another database than PostgreSQL; and no statement of ours needs it.
    jsonb.astext_type = None  # type: ignore[assignment]
    json = sa.JSON(none_as_null=True).with_variant(jsonb, "postgresql")
    # SQLite fills in a primary key by itself only where the column is spelled INTEGER.
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    # MySQL keeps whole seconds, and rounds to them, unless it is told how many digits.
    time = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQL)
    # MySQL compares texts by a collation: case, accents and, in most of them, trailing blanks don't count. Bytes are
    # compared exactly, whatever the database's defaults are; 255 characters of UTF-8 are 1,020 at most.
    exact = sa.String(255).with_variant(mysql.VARBINARY(1020), *_MYSQL)
    # Of any script, also where the database's own character set is a smaller one. People read it, nobody compares it.
    path = sa.String(500).with_variant(mysql.VARCHAR(500, charset="utf8mb4"), *_MYSQL)
    # MySQL's BLOB ends at 64 KiB; its FLOAT has seven digits.
    body = sa.LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)
    seconds = sa.Float().with_variant(sa.Double(), *_MYSQL)
    return [
        sa.Column("id", number, primary_key=True, autoincrement=True),
        sa.Column("scope", exact, nullable=False),
        sa.Column("key", exact, nullable=False),
        sa.Column("request_method", sa.String(10), nullable=False),
        sa.Column("request_path", path, nullable=False),
        sa.Column("request_fingerprint", sa.String(64), nullable=False),
        sa.Column("fingerprint_version", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("fencing_token", sa.String(64), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("steps", json, nullable=True),
        sa.Column("response_status", sa.Integer(), nullable=True),
        sa.Column("response_headers", json, nullable=True),
        sa.Column("response_body", body, nullable=True),
        sa.Column("locked_at", time, nullable=False),
        sa.Column("lock_timeout", seconds, nullable=False),
        sa.Column("stale_policy", sa.String(20), nullable=False),
        sa.Column("secret_id", sa.String(64), nullable=True),
        sa.Column("expires_at", time, nullable=False),
        sa.Column("completed_at", time, nullable=True),
        sa.Column("created_at", time, nullable=False),
        sa.Column("updated_at", time, nullable=False),
        *(sa.Column(name, sa.Integer(), nullable=True) for name in COUNTS),
    ]


def _index_name(metadata: sa.MetaData, name: str) -> str | None:
    """``None`` lets the metadata's naming convention decide; a convention without a rule for indexes needs a name."""
    # SQLAlchemy takes a rule under the class itself, too.
    convention: Mapping[Any, Any] = metadata.naming_convention
    rule = convention.get("ix") or convention.get(sa.Index)
    if rule is None or "%(constraint_name)s" in str(rule):
        return name
    return None


def _checked(table: sa.Table) -> sa.Table:
    missing = [column.name for column in _columns() if column.name not in table.c and column.name not in COUNTS]
    if missing:
        raise ConfigurationError(
            f"The table {table.fullname!r} is already in the metadata, but is not one of this extension: it has no "
            f"column {', '.join(missing)}. Choose another name with IDEMPOTENCY_TABLE_NAME."
        )
    return table
