"""Atomic mode's statements on PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..claim import Asking, Claim, Stored
from ..errors import RecordRefused, Undone
from ..recorded import Recorded
from . import rows
from .atomic import Atomic, Bound
from .executor import Executor, ValueRefused
from .framing import FIRST
from .message import Message
from .postgresql import PostgreSQLBackend
from .terms import asked, constant, held, statement

_NAMESPACE = "flask-idempotency: one operation"
_STRICT = ("repeatable read", "serializable")
_NOT_HOLDABLE = "PostgreSQL can't hold the answer's status text or headers: a NUL, or what is no character, is in them."
#: Of this transaction alone, as a parameter of the server's that no server knows.
_LOCKED = "flask_idempotency.lock"


def lock_number(scope: str, key: str) -> int:
    """The advisory lock of a key: signed 64 bits of a hash. Two keys that share one can't be in flight together."""
    digest = hashlib.sha256()
    for part in (_NAMESPACE, scope, key):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest()[:8], "big", signed=True)


@dataclass(slots=True)
class _Known:
    """What earlier transactions have shown; all of an engine's are of the same kind, usually."""

    strict: bool = False


class AtomicPostgreSQL(Atomic, PostgreSQLBackend):
    """A lock of the transaction's own on the key, tried and never waited for, and then a look.

    Under READ COMMITTED the look must be a statement of its own: its snapshot has to be younger than the lock, or it
    misses what the lock's last holder has committed. Under REPEATABLE READ and SERIALIZABLE no look is young enough,
    the transaction's only snapshot being older; there the unique index decides, so the row is inserted first.
    """

    def __init__(self, table: sa.Table, run: Executor) -> None:
        super().__init__(table, run)
        self._known = _Known()
        #: Of the operation: where its row is, which it inserted first.
        self._place: str | None = None

    def enter(self, asking: Asking) -> Claim | Stored | None:
        """Take a key that is not there, or return what is; ``None``: somebody is at it, or was first."""
        try:
            # What an insert has met, and the snapshot shows, may be an answer, or something to take over.
            return (self._insert_first(asking) if self._known.strict else None) or self._look_first(asking)
        except Undone:
            return None

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored``; ``None``: somebody else was first."""
        try:
            self._withdraw()
            return super().take(asking, stored)
        except Undone:
            return None

    def _refusal(self, recorded: Recorded) -> RecordRefused | None:
        # An error of the database's would cost the whole transaction.
        return None if _holdable(recorded) else RecordRefused(_NOT_HOLDABLE)

    def _kept_once(self, claim: Claim, asking: Asking, recorded: Recorded, retention: float, last: bool) -> bool:
        if self._place is None:
            return super()._kept_once(claim, asking, recorded, retention, last)
        values = {**held(claim), **self._times(retention), **rows.answer_parameters(recorded)}
        values.update(asked_retention=retention, held_place=self._place)
        return self.run.write(self._complete_early, values, refused=RecordRefused).count == 1

    def _insert_first(self, asking: Asking) -> Claim | None:
        values = {**asked(asking), **_lock_of(asking)}
        statement: sa.Executable | Message = self._early
        if self.frame is not None and not self.frame.begun:
            statement = self._early_opening
            self.frame.opened(None)
        self._withdraw()
        for row in self.run.write(statement, values).rows:
            self._known.strict, self._place = row.level in _STRICT, row.place
            return rows.claim_of(asking, row.id)
        return None

    def _look_first(self, asking: Asking) -> Claim | Stored | None:
        look = self._in_one_message if self.run.sends_messages else self._one_by_one
        locked, level, row = look(asking)
        self._known.strict = level in _STRICT
        if not locked:
            return None
        if row is not None:
            return rows.stored_of(row, asking.scope, asking.key, self._judged(row))
        return self._insert_first(asking) if self._known.strict else rows.claim_of(asking, 0)

    def _in_one_message(self, asking: Asking) -> tuple[bool, str, Any]:
        values = {**_lock_of(asking), "asked_scope": asking.scope, "asked_key": asking.key}
        message = self._locking
        if self.frame is not None and not self.frame.begun:
            message = self._opening
            self.frame.opened(FIRST)
        (row,) = self.run.read(message, values).rows
        return row.locked, row.level, None if row.id is None else row

    def _withdraw(self) -> None:
        """What is written now must stay, whatever the view rolls back."""
        if self.frame is not None:
            self.frame.withdraw()

    def _concluded(self, values: Mapping[str, Any]) -> bool:
        assert isinstance(self.run, Bound)
        try:
            return self.run.conclude(self._last, values)
        except ValueRefused as error:
            raise error.named(RecordRefused) from error.__cause__

    def _one_by_one(self, asking: Asking) -> tuple[bool, str, Any]:
        (entry,) = self.run.read(self._lock, _lock_of(asking)).rows
        found = self.run.read(self._find, {"asked_scope": asking.scope, "asked_key": asking.key}).rows
        return entry.locked, entry.level, found[0] if found else None

    @statement
    def _lock(self) -> sa.Executable:
        return sa.select(self._trying().label("locked"), self._level())

    @statement
    def _locking(self) -> Message:
        return Message(self._keeping_lock(), self._looking())

    @statement
    def _opening(self) -> Message:
        # The savepoint after the lock, which a return to it would give back, and before the look, which is wanted.
        savepoint = sa.text(f"SAVEPOINT {FIRST}")
        return Message(sa.text("BEGIN"), self._keeping_lock(), savepoint, self._looking())

    @statement
    def _early_opening(self) -> Message:
        return Message(sa.text("BEGIN"), self._early)

    @statement
    def _last(self) -> Message:
        # Not DO NOTHING: a key that is there has to keep the COMMIT from being carried out.
        record = sa.insert(self.table).values({**self._insert_values(), **self._record_values()}).inline()
        return Message(record, sa.text("COMMIT"))

    @statement
    def _early(self) -> sa.Insert:
        place = sa.cast(sa.literal_column("ctid"), sa.String()).label("place")
        return self._inserting_where(self._trying()).returning(self.table.c.id, self._level(), place)

    @statement
    def _complete_early(self) -> sa.Executable:
        # Under SERIALIZABLE finding the row by an index, or by looking through a small table, would count as reading
        # what the operations of other keys write, and they would undo each other. Nobody else can move it.
        return (
            sa.update(self.table)
            .where(sa.text("ctid = CAST(:held_place AS tid)"), self._by_holder())
            .values(self._record_values())
        )

    def _trying(self) -> sa.ColumnElement[bool]:
        number = sa.cast(sa.bindparam("lock", type_=sa.String()), sa.BigInteger())
        return sa.func.pg_try_advisory_xact_lock(number, type_=sa.Boolean())

    def _level(self) -> sa.Label[str]:
        return sa.func.current_setting("transaction_isolation", type_=sa.String()).label("level")

    def _keeping_lock(self) -> sa.Select[Any]:
        """The lock's answer is kept for the look's own row, as a setting of this transaction."""
        return sa.select(sa.func.set_config(constant(_LOCKED), sa.cast(self._trying(), sa.Text()), sa.true()))

    def _looking(self) -> sa.Select[Any]:
        locked = sa.cast(sa.func.current_setting(constant(_LOCKED)), sa.Boolean()).label("locked")
        entry = sa.select(locked, self._level()).subquery("entry")
        found = self._find.subquery("found")
        return sa.select(*entry.c, *found.c).select_from(entry.outerjoin(found, sa.true()))


def _lock_of(asking: Asking) -> dict[str, Any]:
    """The parameter of a key's lock.

    As a text: a negative number is negated after its digits were read, and of the smallest they are too large.
    """
    return {"lock": str(lock_number(asking.scope, asking.key))}


def _holdable(recorded: Recorded) -> bool:
    """Whether PostgreSQL can hold the answer's texts: no NUL, and nothing that is no character."""
    texts = [recorded.reason or "", *(text for header in recorded.headers for text in header)]
    return not any("\x00" in text or any("\ud800" <= c <= "\udfff" for c in text) for text in texts)
