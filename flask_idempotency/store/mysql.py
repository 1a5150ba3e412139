"""MySQL and MariaDB: one statement a decision, in the driver's autocommit mode.

A statement is a transaction, so that no lock of InnoDB's, on rows or on the gaps between them, outlives it. Where two
statements meet all the same and one is undone as a deadlock, nothing of it was done, and the executor repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from ..claim import Claim, Stored
from ..errors import RecordRefused, StoreError
from ..recorded import Recorded
from . import failures, rows
from .backend import Backend
from .base import Deleted
from .executor import Executor, Outcome
from .terms import statement

_NOW = sa.literal_column("UTC_TIMESTAMP(6)", sa.DateTime(timezone=True))
_MICROSECOND: sa.ColumnElement[Any] = sa.literal_column("MICROSECOND")
_MILLION = sa.literal_column("1e6", sa.Float())
_PACKET = sa.select(sa.literal_column("@@max_allowed_packet", sa.Integer()))
#: The unique indexes that let at most one row have a scope and key.
_DECIDING = sa.text(
    "SELECT index_name FROM information_schema.statistics "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name AND non_unique = 0 "
    "GROUP BY index_name HAVING SUM(column_name NOT IN ('scope', 'key')) = 0"
)
_SIZE = sa.text(
    "SELECT data_length + index_length FROM information_schema.tables "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name"
)
#: What a statement says beside the value that makes it large. A driver may spell a byte as two characters.
_SPELLED, _BESIDE = 2, 4096
#: Rows deleted by one statement. A request that comes for one of them waits no longer than for so many.
_DELETED_AT_ONCE = 500


class ExactText(sa.TypeDecorator[str]):
    """A text in a column of bytes, which are compared as they are: as UTF-8, whatever the connection's own charset is.

    A column that an earlier version has made gives, and compares, texts.
    """

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> bytes | None:
        """The text's bytes."""
        return None if value is None else value.encode()

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> str | None:
        """The bytes' text.

        :raises UnicodeDecodeError: they are none.
        """
        return bytes(value).decode() if isinstance(value, (bytes, bytearray, memoryview)) else value


class _SpelledText(sa.TypeDecorator[str]):
    """A text as the digits of its UTF-8, which any connection can send, whatever its driver makes of bytes."""

    impl = sa.String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """The text's digits."""
        return None if value is None else value.encode(errors="replace").hex()


class MySQLClock:
    """``UTC_TIMESTAMP(6)``, whatever the time zone of session and server. It stands still during a statement."""

    now: sa.ColumnElement[Any] = _NOW

    def later(self, seconds: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        """Now and so many seconds."""
        return sa.func.timestampadd(_MICROSECOND, sa.func.round(seconds * _MILLION), _NOW, type_=_NOW.type)

    def since(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
        """Counted in microseconds."""
        return sa.func.timestampdiff(_MICROSECOND, moment, _NOW, type_=sa.Float()) / _MILLION

    def reached(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Compared with one reading of the clock."""
        return moment <= _NOW


class MySQLBackend(Backend):
    """A claim is two statements, a replay one."""

    def __init__(self, table: sa.Table, run: Executor) -> None:
        # The table of the metadata has types of SQLAlchemy's own, for migrations; its twin is for statements.
        twin = table.to_metadata(sa.MetaData(schema=table.metadata.schema))
        twin.c.scope.type = twin.c.key.type = ExactText()
        self._decided = False
        super().__init__(twin, run, MySQLClock())

    def record(self, claim: Claim, recorded: Recorded, retention: float) -> bool:
        """Store the answer; False: the claim was lost."""
        with self._measured(_size(recorded)):
            return super().record(claim, recorded, retention)

    def settle(self, stored: Stored, recorded: Recorded, retention: float, token: str, force: bool = False) -> bool:
        """Record an answer over ``stored``; False: it has changed, or is not to be settled."""
        with self._measured(_size(recorded)):
            return super().settle(stored, recorded, retention, token, force)

    def keep_steps(self, claim: Claim, steps: Mapping[str, str]) -> bool:
        """Store the results of all steps so far; False: the claim was lost."""
        with self._measured(len(json.dumps(dict(steps)))):
            return super().keep_steps(claim, steps)

    def prune(self, batch_size: int, bodies: bool = False) -> Deleted:
        """Look for a few of them, and delete those that are still past their retention then, until it is a batch.

        What another pruner was quicker to delete does not count; so a batch that comes out short is the last one. Its
        bodies are named all the same: of a key that was past its retention nobody needs one.
        """
        deleted = 0
        headers: list[object] = []
        while deleted < batch_size:
            few = min(_DELETED_AT_ONCE, batch_size - deleted)
            found = self.run.read(self._few_telling if bodies else self._few, {"batch_size": few}).rows
            if not found:
                break
            deleted += self.run.write(self._prune, {"few_ids": [row.id for row in found]}).count
            headers += [row.headers for row in found] if bodies else []
        return Deleted(deleted, rows.named(headers))

    def _inserted(self, values: dict[str, Any]) -> Outcome | None:
        self._assert_decided()
        try:
            return super()._inserted(values)
        except StoreError as error:
            if error.__cause__ is not None and failures.is_duplicate(error.__cause__):
                return None
            raise

    def _assert_decided(self) -> None:
        """Once for all: without the unique index, which alone decides a race, no claim may be granted.

        Here no statement names it, which would fail without it. And the table can be there while it is not: DDL is
        not part of a transaction, so that a migration, or ``create_all()``, can end in between.
        """
        if not self._decided:
            if not self.run.read(_DECIDING, {"schema": self.run.schema, "name": self.table.name}).rows:
                raise failures.lacks_schema(self.table, "It has no unique index on scope and key.")
            self._decided = True

    def _insert_values(self) -> dict[str, Any]:
        exact = {name: sa.bindparam(f"asked_{name}", type_=self.table.c[name].type) for name in ("scope", "key")}
        return {**super()._insert_values(), **exact}

    def _lease_values(self) -> dict[str, Any]:
        # Any client may ask for a path of any script, and the connection's own charset may be a small one (utf8).
        path = sa.func.unhex(sa.bindparam("asked_path", type_=_SpelledText()))
        return {**super()._lease_values(), "request_path": sa.cast(path, mysql.CHAR(charset="utf8mb4"))}

    def _exact_path(self) -> sa.ColumnElement[Any]:
        # A group of MySQL's is of what its collation takes for equal.
        text = sa.cast(self.table.c.request_path, mysql.CHAR(charset="utf8mb4"))
        return sa.collate(text, "utf8mb4_bin").label("request_path")

    def _size(self) -> int | None:
        # About: InnoDB estimates it, and MySQL 8 remembers for a day what it told last.
        for row in self.run.read(_SIZE, {"schema": self.run.schema, "name": self.table.name}).rows:
            return None if row[0] is None else int(row[0])
        return None

    @statement
    def _few(self) -> sa.Select[Any]:
        return self._doomed()

    @statement
    def _few_telling(self) -> sa.Select[Any]:
        return self._doomed().add_columns(self._body_headers())

    @statement
    def _prune(self) -> sa.Delete:
        # It has no LIMIT within IN, and none of its own in every SQLAlchemy.
        few = self.table.c.id.in_(sa.bindparam("few_ids", expanding=True))
        return sa.delete(self.table).where(few, self._past_retention())

    @contextmanager
    def _measured(self, size: int) -> Iterator[None]:
        """Tell a statement that is too large for the server from one whose connection broke.

        The server cuts the connection while the client is still sending, so that its error is seldom read. Repeated
        in the background, such a recording would fail for ever.
        """
        try:
            yield
        except StoreError as error:
            cause = error.__cause__
            told = cause is not None and failures.is_too_large(cause)
            if cause is None or not (told or failures.is_lost(cause)):
                raise
            try:
                limit = int(self.run.read(_PACKET).rows[0][0])
            except StoreError:
                raise error from cause
            if not told and size * _SPELLED + _BESIDE < limit:
                raise
            raise RecordRefused(
                f"A value of {size} bytes is too large for the database, whose max_allowed_packet is {limit}: the "
                "statement takes up to twice the value's size. Raise it, or lower IDEMPOTENCY_MAX_BODY."
            ) from cause


def _size(recorded: Recorded) -> int:
    """How many bytes the row is to hold: of a body, and of headers."""
    values = rows.answer_values(recorded)
    return len(values["response_body"] or b"") + len(json.dumps(values["response_headers"]))
