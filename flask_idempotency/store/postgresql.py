"""PostgreSQL: one statement a decision, and one message a call where the driver can send it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from ..claim import Asking, Claim, Stored
from . import rows
from .backend import Backend
from .base import Deleted
from .executor import Executor
from .message import Message
from .terms import asked, constant, quoted, statement

#: The table with its indexes and its TOAST, and so each of its partitions, which hold all of it where there are any.
_SIZE = sa.text(
    "WITH RECURSIVE parts AS (SELECT CAST(CAST(:name AS regclass) AS oid) AS part UNION ALL "
    "SELECT inhrelid FROM pg_inherits JOIN parts ON inhparent = part) "
    "SELECT sum(pg_total_relation_size(part)) FROM parts"
)


class PostgreSQLClock:
    """``clock_timestamp()``, which goes on within a transaction. Instants, whatever a session's time zone."""

    now: sa.ColumnElement[Any] = sa.func.clock_timestamp(type_=sa.DateTime(timezone=True))

    def later(self, seconds: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        """Now and so many seconds."""
        return self.now + sa.cast(seconds, sa.Float()) * sa.literal_column("interval '1 second'", sa.Interval())

    def since(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
        """The length of an interval, in seconds."""
        return sa.cast(sa.extract("epoch", self.now - moment), sa.Float())

    def reached(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Compared with one reading of the clock."""
        # In a subquery it is read once. Compared with a function that changes from row to row, the index
        # on expires_at would be no use.
        return moment <= sa.select(self.now).scalar_subquery()


class PostgreSQLBackend(Backend):
    """A claim is an insert and a look, in one message where the driver can send it; all else is one statement."""

    returning = True
    # A list is one parameter here, so this is no limit of the protocol: the statement's rows are locked until it ends.
    renewed_at_once = 10_000

    def __init__(self, table: sa.Table, run: Executor) -> None:
        super().__init__(table, run, PostgreSQLClock())

    def _claim_once(self, asking: Asking) -> Claim | Stored | None:
        """Insert the key where it is not there, and look at what is there then; ``None``: it is gone again.

        The unique index decides between inserts, and whoever was first has committed when the look begins. Whose
        claim it is the token tells, after a lost reply as well.
        """
        if self.run.sends_messages:
            found = self.run.write(self._claim, asked(asking)).rows
        else:
            self.run.write(self._insert, asked(asking))
            found = self.run.read(self._find, {"asked_scope": asking.scope, "asked_key": asking.key}).rows
        for row in found:
            return rows.found(row, asking, rows.stored_of(row, asking.scope, asking.key, self._judged(row)))
        return None

    def _renew_some(self, claims: Sequence[Claim]) -> set[str]:
        """What somebody else has locked is passed over: one locked row must not keep the others from renewal.

        Its claim holds as long as the row says so; whoever has locked it keeps a takeover off as well.
        """
        renewed = super()._renew_some(claims)
        rest = [claim for claim in claims if claim.token not in renewed]
        if not rest:
            return renewed
        values = {"held_ids": [claim.id for claim in rest], "held_tokens": [claim.token for claim in rest]}
        return renewed | {row.fencing_token for row in self.run.reserved.read(self._renewed, values).rows}

    def _among(self, column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
        return column == sa.any_(sa.bindparam(name, type_=postgresql.ARRAY(column.type)))

    def _renewable(self) -> sa.ColumnElement[bool]:
        c = self.table.c
        free = sa.select(c.id).where(self._among_held()).with_for_update(key_share=True, skip_locked=True)
        return c.id == sa.any_(sa.func.array(free.scalar_subquery()))

    def _judging(self) -> list[sa.ColumnElement[Any]]:
        # As numbers: drivers can't read each style of a session's dates, nor a time that Python has no year for.
        c = self.table.c
        times = {one.name: one for one in (c.locked_at, c.expires_at, c.completed_at)} | {"clock": self.clock.now}
        return [self._moment(time).label(name) for name, time in times.items()]

    def _moment(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.func.date_part(constant("epoch"), moment, type_=sa.Float())

    def _size(self) -> int | None:
        if self.run.dialect_name != "postgresql":
            return None  # one that speaks as PostgreSQL does may know none of this
        name = quoted(self.run.schema, self.table.name)
        return int(self.run.read(_SIZE, {"name": name}).rows[0][0])

    def _judged(self, row: sa.Row[Any]) -> rows.Judgement:
        return rows.judged_by_clock(row)

    def _inserting(self, values: dict[str, Any]) -> sa.Insert:
        c = self.table.c
        return postgresql.insert(self.table).values(values).on_conflict_do_nothing(index_elements=[c.scope, c.key])

    @statement
    def _claim(self) -> Message:
        return Message(self._insert, self._find)

    @statement
    def _record_message(self) -> Message:
        return Message(self._record)

    def _recording(self) -> sa.Executable | Message:
        return self._record_message if self.run.sends_messages else self._record

    @statement
    def _insert(self) -> sa.Insert:
        """Where the key is there, nothing is written: no transaction id, no lock on the row, nothing for the log."""
        there = sa.select(sa.literal_column("1")).select_from(self.table).where(self._at_key()).exists()
        return self._inserting_where(~there)

    def _inserting_where(self, condition: sa.ColumnElement[bool]) -> postgresql.Insert:
        c = self.table.c
        values = self._insert_values()
        new = sa.select(*(value.label(name) for name, value in values.items())).where(condition)
        return (
            postgresql.insert(self.table)
            .from_select(list(values), new, include_defaults=False)
            .on_conflict_do_nothing(index_elements=[c.scope, c.key])
        )

    def _told(self, deleted: Sequence[sa.Row[Any]]) -> Deleted:
        (done,) = deleted
        return Deleted(done.deleted, rows.named(done.bodies or ()))

    @statement
    def _prune(self) -> sa.Delete:
        c = self.table.c
        # Rows that another pruner, or a request, is at work on are left to it: nobody waits for anybody.
        doomed = self._doomed().with_for_update(skip_locked=True).cte("doomed")
        # As an array, so that the rows are deleted by the primary key however many they are.
        ids = sa.func.array(sa.select(doomed.c.id).scalar_subquery())
        return sa.delete(self.table).where(c.id == sa.any_(ids))

    @statement
    def _prune_telling(self) -> sa.Executable:
        # A statement of its own: to look at each deleted row costs a fifth more. One row comes back, whatever was
        # deleted.
        done = self._prune.returning(self._body_headers()).cte("done")
        bodies = sa.func.json_agg(done.c.headers, type_=sa.JSON()).filter(done.c.headers.is_not(sa.null()))
        return sa.select(sa.func.count().label("deleted"), bodies.label("bodies")).select_from(done)
