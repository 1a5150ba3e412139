"""SQLite: one writer, times as texts."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from .backend import Backend
from .executor import Executor
from .terms import constant, quoted

_SECONDS_PER_DAY = 86400.0

#: What tells how large a table is, is not in every SQLite.
_TELLS_SIZES = sa.text("SELECT 1 FROM pragma_compile_options WHERE compile_options = 'ENABLE_DBSTAT_VTAB'")
_SIZE = sa.text("SELECT coalesce(sum(pgsize), 0) FROM dbstat WHERE schema = :schema AND name = :name")


class SQLiteClock:
    """Times are stored as SQLAlchemy spells them, in UTC, to the millisecond.

    They are compared as Julian days, so that any other spelling means the same instant too: as texts,
    ``T`` and a blank between date and time would order wrongly.
    """

    _format = constant("%Y-%m-%d %H:%M:%f")
    _now = constant("now")
    _micros = constant("000")
    now: sa.ColumnElement[Any] = sa.func.strftime(_format, _now).concat(_micros)

    def later(self, seconds: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        """Now and so many seconds, as a text."""
        modifier = sa.func.printf(constant("%+.3f seconds"), seconds)
        return sa.func.strftime(self._format, self._now, modifier).concat(self._micros)

    def since(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
        """The difference of two Julian days."""
        return (self._day(self._now) - self._day(moment)) * sa.literal_column(str(_SECONDS_PER_DAY), sa.Float())

    def reached(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Compared as Julian days too."""
        return self._day(moment) <= self._day(self._now)

    def _day(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
        return sa.func.julianday(moment, type_=sa.Float())


class SQLiteBackend(Backend):
    """A claim is two statements, a replay one, and no reader waits for a writer."""

    def __init__(self, table: sa.Table, run: Executor) -> None:
        super().__init__(table, run, SQLiteClock())

    def _body_headers(self) -> sa.ColumnElement[Any]:
        # Not IS NULL: after RETURNING, SQLite 3.40 for one takes it for false of a column that is NULL.
        c = self.table.c
        absent = sa.func.typeof(c.response_body) == constant("null")
        return sa.case((absent, c.response_headers)).label("headers")

    def _moment(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        # In one spelling, whatever the row's own is. What is no time is NULL.
        return sa.func.strftime(SQLiteClock._format, moment, type_=sa.String())

    def _size(self) -> int | None:
        if not self.run.read(_TELLS_SIZES).rows:
            return None
        schema = self.run.schema or "main"
        parts = sa.text(f"SELECT name FROM {quoted(schema)}.sqlite_master WHERE tbl_name = :name")
        names = [row.name for row in self.run.read(parts, {"name": self.table.name}).rows]
        # One by one: so it reads these alone, and not the whole file.
        return sum(int(self.run.read(_SIZE, {"schema": schema, "name": name}).rows[0][0]) for name in names)

    def _inserting(self, values: dict[str, Any]) -> sa.Insert:
        from sqlalchemy.dialects import sqlite  # an app on another database has no need of it

        c = self.table.c
        return sqlite.insert(self.table).values(values).on_conflict_do_nothing(index_elements=[c.scope, c.key])
