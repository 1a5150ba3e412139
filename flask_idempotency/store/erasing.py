"""Deleting keys of a scope, whatever their status: what an off-boarding or an erasure asks for."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from ..claim import Status
from ..scope import fits
from . import rows
from .base import Deleted
from .keeping import Keeping
from .terms import constant, statement

#: Keys deleted by one statement. A request that comes for one of them waits no longer than for so many.
ERASED: Final = 500


class Erasing(Keeping):
    """Erasure, on any database."""

    def erase(self, scope: str, batch_size: int, bodies: bool = False, key: str | None = None) -> Deleted:
        """Delete at most ``batch_size`` keys of a scope, or one, a few at a time, and name their bodies elsewhere.

        A key that is recorded between the look at it and its deletion is looked at again: else its body would stay.
        """
        deleted = 0
        named: list[str] = []
        look = self._look_for(key is not None, bodies)
        asked = {"asked_scope": scope} if key is None else {"asked_scope": scope, "asked_key": key}
        while fits(scope) and fits(key or "") and deleted < batch_size:
            found = self.run.read(look, {**asked, "batch_size": min(ERASED, batch_size - deleted)}).rows
            if not found:
                break
            done = [row for row in found if row.done]
            for erasing, chosen in ((self._erase_done, done), (self._erase_others, found)):
                values = {"asked_scope": scope, "few_ids": [row.id for row in chosen]}
                deleted += self.run.write(erasing, values).count if chosen else 0
            named += rows.named(row.headers for row in done) if bodies else ()
        return Deleted(deleted, tuple(named))

    def _look_for(self, one: bool, bodies: bool) -> sa.Executable:
        if one:
            return self._erasable_one_telling if bodies else self._erasable_one
        return self._erasable_telling if bodies else self._erasable

    # Statements

    @statement
    def _erasable(self) -> sa.Select[Any]:
        c = self.table.c
        limit = sa.bindparam("batch_size", type_=sa.Integer())
        done = sa.case((self._is(Status.COMPLETED), sa.literal_column("1")), else_=sa.literal_column("0"))
        # In the order of the index, so that no sort looks at all keys of a large scope each time.
        return sa.select(c.id, done.label("done")).where(self._of_scope()).order_by(c.scope, c.key).limit(limit)

    @statement
    def _erasable_telling(self) -> sa.Select[Any]:
        return self._erasable.add_columns(self._body_headers())

    @statement
    def _erasable_one(self) -> sa.Executable:
        return self._erasable.where(self._at_key())

    @statement
    def _erasable_one_telling(self) -> sa.Executable:
        return self._erasable_telling.where(self._at_key())

    @statement
    def _erase_done(self) -> sa.Executable:
        return self._erasing(self._is(Status.COMPLETED))

    @statement
    def _erase_others(self) -> sa.Executable:
        return self._erasing(self.table.c.status != constant(Status.COMPLETED.value))

    # Their parts

    def _erasing(self, condition: sa.ColumnElement[bool]) -> sa.Delete:
        few = self._among(self.table.c.id, "few_ids")
        return sa.delete(self.table).where(self._of_scope(), few, condition)

    def _of_scope(self) -> sa.ColumnElement[bool]:
        return self.table.c.scope == sa.bindparam("asked_scope")
