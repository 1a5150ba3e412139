"""What outlives an attempt: steps and the secret's id, holds, releases, and how people or code settle a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ..claim import Claim, Status, Stored
from ..errors import RecordRefused
from ..recorded import Recorded
from . import rows
from .executor import Executor, Outcome
from .terms import Terms, constant, held, statement


class Keeping(Terms):
    """The decisions of a claim's holder about what it leaves, and of whoever settles a key in its place."""

    run: Executor

    # By the holder

    def hold(self, claim: Claim) -> bool:
        """Leave the key to a person; False: the claim was lost."""
        return self.run.write(self._hold, {**held(claim), **self._times()}).count == 1

    def resume(self, claim: Claim) -> Mapping[str, str] | None:
        """The results of steps, and a sign of life; ``None``: the claim was lost."""
        found = self._written(self.run.write(self._resume, {**held(claim), **self._times()}), claim)
        return None if found is None else rows.steps_of(found)

    def keep_steps(self, claim: Claim, steps: Mapping[str, str]) -> bool:
        """Store the results of all steps so far; False: the claim was lost."""
        # Without one the column is NULL, by which a release knows that nothing needs the row.
        values = {**held(claim), **self._times(), "kept_steps": dict(steps) or None}
        return self.run.write(self._keep_steps, values, refused=RecordRefused).count == 1

    def note_secret(self, claim: Claim, secret_id: str) -> str | None:
        """Note the secret's id, unless one is noted; returns the one that is; ``None``: the claim was lost."""
        values = {**held(claim), **self._times(), "kept_secret": secret_id}
        found = self._written(self.run.write(self._note_secret, values), claim)
        return None if found is None else str(found.secret_id)

    def release(self, claim: Claim) -> bool:
        """Give the claim up; False: it was lost."""
        deleted = self.run.write(self._release, held(claim))
        if deleted.count == 1:
            return True
        kept = self.run.write(self._release_kept, {**held(claim), **self._times()})
        # Where a first reply was lost, the row that is gone, or released, most likely is so by that try; and if
        # it is not, the claim is no more this holder's either way.
        return kept.count == 1 or kept.repeated or deleted.repeated

    # In the holder's place

    def settle(self, stored: Stored, recorded: Recorded, retention: float, token: str, force: bool = False) -> bool:
        """Record an answer over ``stored``; False: it has changed, or is not to be settled."""
        seen = self._seen(stored, force)
        if seen is None:
            return False
        values = {**seen, **self._times(retention), "asked_retention": retention, "new_token": token}
        values.update(rows.answer_parameters(recorded))
        statement = self._settle_forced if force else self._settle
        outcome = self.run.write(statement, values, refused=RecordRefused)
        return outcome.count == 1 or (outcome.repeated and self._token_now(stored) == token)

    def free(self, stored: Stored, retention: float, token: str, force: bool = False) -> bool:
        """Make ``stored`` claimable; False: it has changed, or is not to be freed."""
        seen = self._seen(stored, force)
        if seen is None:
            return False
        deleted = self.run.write(self._free_forced if force else self._free, seen)
        if deleted.count == 1:
            return True
        values = {**seen, **self._times(retention), "asked_retention": retention, "new_token": token}
        kept = self.run.write(self._free_kept_forced if force else self._free_kept, values)
        if kept.count == 1 or not (deleted.repeated or kept.repeated):
            return kept.count == 1
        # A first reply was lost: a row that is gone is free, and one that has the new token was freed here.
        return self._token_now(stored) in (None, token)

    # Parts

    def _seen(self, stored: Stored, force: bool) -> dict[str, Any] | None:
        """The parameters of a compare-and-swap on ``stored``; ``None`` where it is known that none can succeed."""
        return {
            "asked_scope": stored.scope,
            "asked_key": stored.key,
            "seen_token": stored.token,
            "seen_status": stored.status.value,
        }

    def _written(self, outcome: Outcome, claim: Claim) -> sa.Row[Any] | None:
        """The row that a holder has just written."""
        found = outcome.rows
        if not self.returning and outcome.count == 1:
            found = self.run.read(self._kept, held(claim)).rows
        return found[0] if found else None

    def _token_now(self, stored: Stored) -> str | None:
        values = {"asked_scope": stored.scope, "asked_key": stored.key}
        for row in self.run.read(self._token, values).rows:
            return str(row.fencing_token)
        return None

    # Statements

    @statement
    def _hold(self) -> sa.Executable:
        holdable = self.table.c.status.in_([constant(Status.IN_PROGRESS.value), constant(Status.HELD.value)])
        return sa.update(self.table).where(self._by_holder(), holdable).values(self._ended_values(Status.HELD))

    @statement
    def _kept(self) -> sa.Executable:
        return sa.select(*self._kept_columns()).where(self._by_holder(), self._running())

    @statement
    def _resume(self) -> sa.Executable:
        return self._telling(self._mine().values(locked_at=self.clock.now))

    @statement
    def _keep_steps(self) -> sa.Executable:
        now = self.clock.now
        steps = sa.bindparam("kept_steps", type_=self.table.c.steps.type)
        return self._mine().values(steps=steps, locked_at=now, updated_at=now)

    @statement
    def _note_secret(self) -> sa.Executable:
        now, noted = self.clock.now, self.table.c.secret_id
        secret = sa.func.coalesce(noted, sa.bindparam("kept_secret", type_=noted.type))
        return self._telling(self._mine().values(secret_id=secret, locked_at=now, updated_at=now))

    @statement
    def _release(self) -> sa.Executable:
        return sa.delete(self.table).where(self._by_holder(), self._running(), self._bare())

    @statement
    def _release_kept(self) -> sa.Executable:
        return self._mine().values(self._ended_values(Status.RELEASED))

    @statement
    def _token(self) -> sa.Executable:
        return sa.select(self.table.c.fencing_token).where(self._at_key())

    @statement
    def _settle(self) -> sa.Executable:
        return self._settling(sa.or_(self._is(Status.RELEASED), self._is(Status.HELD), self._left()))

    @statement
    def _settle_forced(self) -> sa.Executable:
        return self._settling(sa.or_(self._is(Status.RELEASED), self._is(Status.HELD), self._running()))

    @statement
    def _free(self) -> sa.Executable:
        return sa.delete(self.table).where(self._as_seen(), self._freeable(), self._bare())

    @statement
    def _free_forced(self) -> sa.Executable:
        return sa.delete(self.table).where(self._as_seen(), self._freeable_forced(), self._bare())

    @statement
    def _free_kept(self) -> sa.Executable:
        return self._renaming(self._freed_values()).where(self._freeable())

    @statement
    def _free_kept_forced(self) -> sa.Executable:
        return self._renaming(self._freed_values()).where(self._freeable_forced())

    # Their parts

    def _mine(self) -> sa.Update:
        return sa.update(self.table).where(self._by_holder(), self._running())

    def _settling(self, condition: sa.ColumnElement[bool]) -> sa.Update:
        return self._renaming(self._record_values()).where(condition)

    def _renaming(self, values: dict[str, Any]) -> sa.Update:
        token = sa.bindparam("new_token", type_=sa.String())
        return sa.update(self.table).where(self._as_seen()).values({**values, "fencing_token": token})

    def _as_seen(self) -> sa.ColumnElement[bool]:
        """The status, too: a record keeps its claim's token, and must not be dropped by who saw a live claim."""
        c = self.table.c
        same = (c.fencing_token == sa.bindparam("seen_token"), c.status == sa.bindparam("seen_status"))
        return sa.and_(self._at_key(), *same)

    def _freeable(self) -> sa.ColumnElement[bool]:
        return sa.or_(self._is(Status.HELD), self._left())

    def _freeable_forced(self) -> sa.ColumnElement[bool]:
        return sa.or_(self._is(Status.HELD), self._is(Status.COMPLETED), self._running())

    def _bare(self) -> sa.ColumnElement[bool]:
        """Nothing needs the row."""
        c = self.table.c
        return sa.and_(c.steps.is_(sa.null()), c.secret_id.is_(sa.null()))

    def _is(self, status: Status) -> sa.ColumnElement[bool]:
        return self.table.c.status == constant(status.value)

    def _telling(self, statement: sa.Update) -> sa.Executable:
        return statement.returning(*self._kept_columns()) if self.returning else statement

    def _kept_columns(self) -> list[sa.ColumnElement[Any]]:
        c = self.table.c
        # JSON's null and SQL's are the same in Python, but one of them is no object.
        stepless = sa.case((c.steps.is_(sa.null()), sa.literal_column("1")), else_=sa.literal_column("0"))
        return [c.id, c.secret_id, c.steps, stepless.label("stepless")]
