"""Which shape the table has in the database: with the columns of counts, or as release 0.4 and before made it.

Code and migration may come in either order. So what needs the newer columns asks first whether they are there.
"""

from __future__ import annotations

import time
from typing import Final

import sqlalchemy as sa

from .executor import Executor
from .table import COUNTS

#: Seconds for which an answer is good. Asked only by what needs the columns, so it is seldom asked at all; and a
#: migration, or its downgrade, is noticed by a running process within this time.
ASKED_AGAIN: Final = 60.0


class Shape:
    """What is known of one table's columns."""

    def __init__(self, table: sa.Table) -> None:
        self._table = table
        self._counts = False
        self._until = 0.0

    def has_counts(self, run: Executor) -> bool:
        """Whether the columns of counts are there, in the metadata and in the database."""
        if any(name not in self._table.c for name in COUNTS):
            return False
        if time.monotonic() >= self._until:
            columns = run.looked(lambda connection: columns_of(connection, self._table, run.schema))
            self._counts = set(COUNTS) <= set(columns)
            self._until = time.monotonic() + ASKED_AGAIN
        return self._counts


def columns_of(connection: sa.Connection, table: sa.Table, schema: str | None) -> list[str]:
    """The names of the columns that the table has in the database; none where it is missing."""
    inspector = sa.inspect(connection)
    if not inspector.has_table(table.name, schema=schema):
        return []
    return [one["name"] for one in inspector.get_columns(table.name, schema=schema)]
