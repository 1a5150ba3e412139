"""Any other database: its clock is read, and the arithmetic done here.

A few statements more than where the database can do it, and the same promises: what was judged is still
true when it is acted on, since the condition names both the token and the last sign of life that were seen.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..claim import Asking, Claim, Status, Stored
from ..errors import StoreError
from . import rows
from .backend import Backend
from .base import Deleted
from .executor import Executor, Outcome
from .survey import Stats
from .surveying import AGES
from .terms import asked, constant, statement

_TIME = sa.DateTime(timezone=True)
#: CURRENT_TIMESTAMP, where it lacks fractions of a second or means the session's own time zone.
_CLOCKS = {
    "mssql": "SYSUTCDATETIME()",
    "oracle": "SYS_EXTRACT_UTC(SYSTIMESTAMP)",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'",
}
_ALL = 2**31 - 1


class PortableClock:
    """Readings of the clock as parameters."""

    now: sa.ColumnElement[Any] = sa.bindparam("clock_now", type_=_TIME)

    def later(self, seconds: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        """The sum was made in Python, of the same reading."""
        return sa.bindparam("clock_until", type_=_TIME)

    def since(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
        """Not in SQL."""
        raise NotImplementedError

    def reached(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Compared with the reading."""
        return moment <= self.now


class PortableBackend(Backend):
    """Looks, judges, and writes under the condition that nothing has changed."""

    # Not every driver has such a mode.
    autocommit = False

    def __init__(self, table: sa.Table, run: Executor) -> None:
        self._reading = sa.literal_column(_CLOCKS.get(run.dialect_name, "CURRENT_TIMESTAMP"), _TIME)
        super().__init__(table, run, PortableClock())

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored`` as it is now, if the clock says that it may be."""
        for row, seen in self._look(asking.scope, asking.key):
            if seen.token != stored.token:
                return None
            if seen.expired:
                statement = self._fresh
            elif seen.status is Status.RELEASED or (seen.stale and seen.stale_policy == "reexecute"):
                statement = self._takeover
            else:
                return None
            values = {**asked(asking), **self._times(asking.retention)}
            seen_values = {"seen_token": stored.token, **_seen(row)}
            return self._taken(self.run.write(statement, {**values, **seen_values}), asking)
        return None

    def stats(self) -> Stats:
        """What hangs on a lease is judged here, of the keys that are in progress."""
        stats = super().stats()
        judged = [self._summed(row) for row in self._looked(lambda: self._all_running, {})]
        stale, expired = sum(one.stale for one in judged), sum(one.expired for one in judged)
        return replace(stats, stale=stale, expired=stats.expired + expired)

    def prunable(self) -> int:
        """How many keys are past their retention."""
        return len(self._gone(_ALL))

    def prune(self, batch_size: int, bodies: bool = False) -> Deleted:
        """Delete some of them one by one, each as it was seen."""
        deleted = []
        for row in self._gone(batch_size):
            values = {"seen_id": row.id, "seen_token": row.fencing_token, **_seen(row)}
            if self.run.write(self._delete, values).count:
                deleted.append(row)
        return Deleted(len(deleted), rows.named(row.headers for row in deleted) if bodies else ())

    def _seen(self, stored: Stored, force: bool) -> dict[str, Any] | None:
        """Judged here, as it is now, where the condition can't."""
        for row, now in self._look(stored.scope, stored.key):
            if force or now.stale or now.status is not Status.IN_PROGRESS:
                return {**(super()._seen(stored, force) or {}), "seen_locked_at": row.locked_at}
        return None

    def _gone(self, limit: int) -> list[sa.Row[Any]]:
        values = {**self._times(), "batch_size": limit}
        settled = list(self.run.read(self._settled, values).rows)
        if len(settled) == limit:
            return settled
        # Claims that a crash left, and live ones of long views: few, and only judging tells them apart.
        running = [row for row in self.run.read(self._crashed, values).rows if self._judged(row).expired]
        return (settled + running)[:limit]

    def _inserted(self, values: dict[str, Any]) -> Outcome | None:
        try:
            return super()._inserted(values)
        except StoreError as error:
            if isinstance(error.__cause__, IntegrityError):
                return None
            raise

    def _times(self, seconds: float = 0) -> dict[str, Any]:
        now = self.run.read(sa.select(self._reading)).rows[0][0]
        return {"clock_now": now, "clock_until": now + timedelta(seconds=seconds)}

    def _judged(self, row: sa.Row[Any]) -> rows.Judgement:
        return rows.judged_by_clock(row)

    def _judging(self) -> list[sa.ColumnElement[Any]]:
        c = self.table.c
        return [c.locked_at, c.expires_at, c.completed_at, self._reading.label("clock")]

    def _new_again(self) -> sa.ColumnElement[bool]:
        return self._unchanged()

    def _claimable(self) -> sa.ColumnElement[bool]:
        return self._unchanged()

    def _left(self) -> sa.ColumnElement[bool]:
        return sa.and_(self._running(), self._unchanged())

    def _perhaps_stale(self) -> sa.ColumnElement[bool]:
        return self._running()

    def _surely_expired(self) -> sa.ColumnElement[bool]:
        return sa.and_(self.clock.reached(self.table.c.expires_at), self._done())

    def _younger(self, seconds: float) -> sa.ColumnElement[bool]:
        return self.table.c.created_at > sa.bindparam(f"clock_{seconds:.0f}", type_=_TIME)

    def _age_values(self) -> dict[str, Any]:
        now = self._times()["clock_now"]
        return {"clock_now": now} | {f"clock_{age:.0f}": now - timedelta(seconds=age) for age in AGES}

    def _done(self) -> sa.ColumnElement[bool]:
        """Neither in progress nor waiting for a person."""
        return self.table.c.status.in_([constant(Status.COMPLETED.value), constant(Status.RELEASED.value)])

    @statement
    def _all_running(self) -> sa.Select[Any]:
        return sa.select(*self._summary_columns()).where(self._running())

    def _unchanged(self) -> sa.ColumnElement[bool]:
        """Neither renewed, nor recorded, which leaves the time as it is."""
        c = self.table.c
        return sa.and_(
            c.locked_at == sa.bindparam("seen_locked_at", type_=_TIME), c.status == sa.bindparam("seen_status")
        )

    @statement
    def _settled(self) -> sa.Select[Any]:
        return self._past(self._done()).limit(sa.bindparam("batch_size", type_=sa.Integer()))

    @statement
    def _crashed(self) -> sa.Select[Any]:
        return self._past(sa.and_(self._running(), self.table.c.stale_policy == constant("reexecute")))

    @statement
    def _delete(self) -> sa.Delete:
        c = self.table.c
        seen = sa.and_(c.id == sa.bindparam("seen_id"), c.fencing_token == sa.bindparam("seen_token"))
        return sa.delete(self.table).where(seen, self._unchanged())

    def _past(self, condition: sa.ColumnElement[bool]) -> sa.Select[Any]:
        """What is past its retention, if the condition holds."""
        c = self.table.c
        told = (c.fencing_token, c.status, c.stale_policy, c.lock_timeout, self._body_headers())
        past = self.clock.reached(c.expires_at)
        return sa.select(c.id, *told, *self._judging()).where(past, condition).order_by(c.expires_at)


def _seen(row: sa.Row[Any]) -> dict[str, Any]:
    """The parameters of :meth:`PortableBackend._unchanged`."""
    return {"seen_locked_at": row.locked_at, "seen_status": row.status}
