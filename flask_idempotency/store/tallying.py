"""Counts of replays, conflicts and mismatches beside a key, and how many keys of a scope are kept."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Final

import sqlalchemy as sa

from ..claim import Status
from .executor import Executor
from .failures import lacks_schema
from .shape import Shape
from .survey import Counted, Kept
from .table import COUNTS
from .terms import Terms, constant, statement

#: Keys counted by one statement that names them one by one: each takes 17 parameters, and older SQLite allows 999.
#: What is short of a size is filled up, so that few different statements are built.
_SIZES: Final = (1, 10, 50)


class Tallying(Terms):
    """What is counted beside a key, and how many keys there are."""

    run: Executor
    shape: Shape
    #: Keys counted by one statement.
    counted_at_once = _SIZES[-1]

    def count(self, counted: Sequence[Counted]) -> None:
        """Add to the counts of keys, each statement a transaction of its own; nothing where a key is gone."""
        if any(name not in self.table.c for name in COUNTS):
            raise lacks_schema(self.table, f"In the app's metadata it has no columns {', '.join(COUNTS)}.")
        # In one order for all processes, so that two which count the same keys do not wait for each other.
        ordered = sorted(counted, key=lambda one: (one.scope, one.key))
        for start in range(0, len(ordered), self.counted_at_once):
            self._count_some(ordered[start : start + self.counted_at_once])

    def kept(self, scope: str, limit: int) -> Kept:
        """How many keys of a scope are not new again yet, up to ``limit``; and when the first of them will be.

        Keys past their retention that nobody has pruned are passed over. Of a key that is in progress or held nobody
        knows when it ends.
        """
        values = {"asked_scope": scope, "limit": limit, **self._times()}
        row = self.run.read(self._kept_in_scope, values).rows[0]
        return Kept(int(row.number), max(0.0, -float(row.past or 0.0)))

    def time_there(self) -> float:
        """The database's time, in seconds since 1970."""
        beginning = datetime(1970, 1, 1, tzinfo=timezone.utc)
        return float(self.run.read(self._seconds_since, {"beginning": beginning}).rows[0][0])

    def left_to_people(self) -> tuple[int, int]:
        """How many keys are held, and how many are past a lease that nobody is to take over. Reads the whole table."""
        row = self.run.read(self._left_to_people, self._times()).rows[0]
        return int(row.held), int(row.rejected)

    def longest_overdue(self) -> float:
        """For how many seconds the key that waits longest for ``prune`` has been past its retention."""
        for row in self.run.read(self._longest_overdue, self._times()).rows:
            return float(row.overdue)
        return 0.0

    # Parts

    def _count_some(self, counted: Sequence[Counted]) -> None:
        size = next(size for size in _SIZES if size >= len(counted))
        values: dict[str, Any] = {}
        for place in range(size):
            one = counted[place] if place < len(counted) else None
            numbers = numbers_of(one) if one is not None else (0,) * len(COUNTS)
            # Nothing equals NULL.
            values[f"scope_{place}"] = one.scope if one is not None else None
            values[f"key_{place}"] = one.key if one is not None else None
            values.update({f"{name}_{place}": number for name, number in zip(COUNTS, numbers, strict=True)})
        self.run.write(self._counting(size), values)

    def _counting(self, size: int) -> sa.Update:
        known: dict[Any, Any] = self.built
        built: sa.Update | None = known.get(("counting", size))
        if built is None:
            built = known["counting", size] = self._counting_keys(size)
        return built

    def _counting_keys(self, size: int) -> sa.Update:
        c = self.table.c
        keys = [
            sa.and_(
                c.scope == sa.bindparam(f"scope_{place}", type_=c.scope.type),
                c.key == sa.bindparam(f"key_{place}", type_=c.key.type),
            )
            for place in range(size)
        ]
        added = {
            name: sa.func.coalesce(c[name], 0)
            + sa.case(
                *((key, sa.bindparam(f"{name}_{place}", type_=sa.Integer())) for place, key in enumerate(keys)),
                else_=0,
            )
            for name in COUNTS
        }
        return sa.update(self.table).where(sa.or_(*keys)).values(added)

    # Statements

    @statement
    def _kept_in_scope(self) -> sa.Executable:
        c = self.table.c
        kept = (
            sa.select(c.status, c.expires_at)
            .where(c.scope == sa.bindparam("asked_scope", type_=c.scope.type), sa.not_(self._new_again()))
            .limit(sa.bindparam("limit", type_=sa.Integer()))
            .subquery("kept")
        )
        settled = kept.c.status.in_([constant(Status.COMPLETED.value), constant(Status.RELEASED.value)])
        past = sa.func.max(sa.case((settled, self.clock.since(kept.c.expires_at))))
        return sa.select(sa.func.count().label("number"), past.label("past")).select_from(kept)

    @statement
    def _seconds_since(self) -> sa.Executable:
        return sa.select(self.clock.since(sa.bindparam("beginning", type_=self.table.c.locked_at.type)))

    @statement
    def _left_to_people(self) -> sa.Executable:
        c = self.table.c
        rejected = sa.and_(self._stale(), c.stale_policy == constant("reject"))
        held = c.status == constant(Status.HELD.value)
        return sa.select(
            sa.func.coalesce(sa.func.sum(sa.case((held, 1), else_=0)), 0).label("held"),
            sa.func.coalesce(sa.func.sum(sa.case((rejected, 1), else_=0)), 0).label("rejected"),
        ).where(sa.or_(held, self._running()))

    @statement
    def _longest_overdue(self) -> sa.Executable:
        c = self.table.c
        past = self._expired(self.clock.reached(c.expires_at))
        return sa.select(self.clock.since(c.expires_at).label("overdue")).where(past).order_by(c.expires_at).limit(1)


def numbers_of(one: Counted) -> tuple[int, int, int, int, int]:
    """Its counts in the order of the columns."""
    counts = one.counts
    return counts.replays, counts.conflicts, counts.mismatches, counts.early, counts.late
