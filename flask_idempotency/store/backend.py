"""What all databases have in common: which rows may change, into what, and under which condition.

Each method is one decision, made by one statement whose condition names a fencing token. Backends differ
in how they tell the time, and in how few statements they need.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from ..claim import Asking, Claim, Status, Stored
from ..errors import StoreError
from ..recorded import Recorded
from . import rows
from .base import Deleted, RecordRefused
from .executor import Executor, Outcome
from .message import Message
from .surveying import Surveying
from .terms import Clock, asked, constant, held, statement

#: How many rows are looked at in one statement where all have to be: some milliseconds' work.
PAGE = 5_000

#: A key that is there for the insert and gone for the look-up, so often in a row, is no race any more.
_LOOKS = 10


class Backend(Surveying):
    """The statements of one table, and the decisions made with them."""

    #: Whether statements run in the driver's autocommit mode.
    autocommit = True
    #: Each claim takes two parameters of a statement; older SQLite allows 999.
    renewed_at_once = 400

    def __init__(self, table: sa.Table, run: Executor, clock: Clock) -> None:
        self.table = table
        self.run = run
        self.clock = clock
        self.built = {}

    # Decisions

    def claim(self, asking: Asking) -> Claim | Stored:
        """Take a key that is not there, or return what is."""
        for _ in range(_LOOKS):
            started = time.monotonic()
            result = self._claim_once(asking)
            if isinstance(result, Stored):
                return result
            if result is not None and self._alive(result, started):
                return result
        raise StoreError("The key was there whenever it was to be stored, and gone whenever it was looked up.")

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored``; ``None``: somebody else was first, or the database's clock says no."""
        started = time.monotonic()
        statement = self._fresh if stored.expired else self._takeover
        claim = self._taken(self.run.write(statement, {**asked(asking), "seen_token": stored.token}), asking)
        return claim if claim is not None and self._alive(claim, started) else None

    def record(self, claim: Claim, recorded: Recorded, retention: float) -> bool:
        """Store the answer; False: the claim was lost."""
        values = {**held(claim), **self._times(retention), "asked_retention": retention}
        values.update(rows.answer_parameters(recorded))
        return self.run.write(self._recording(), values, refused=RecordRefused).count == 1

    def renew(self, claims: Sequence[Claim]) -> set[str]:
        """A sign of life for all; returns the tokens that still hold."""
        renewed: set[str] = set()
        for start in range(0, len(claims), self.renewed_at_once):
            renewed |= self._renew_some(claims[start : start + self.renewed_at_once])
        return renewed

    def find(self, scope: str, key: str) -> Stored | None:
        """What is stored under a key."""
        for _, stored in self._look(scope, key):
            return stored
        return None

    def prunable(self) -> int:
        """How many keys are past their retention."""
        return int(self.run.read(self._prunable).rows[0][0])

    def prune(self, batch_size: int, bodies: bool = False) -> Deleted:
        """Delete some of them."""
        values = {"batch_size": batch_size}
        if not bodies:
            return Deleted(self.run.write(self._prune, values).count)
        if self.run.deletes_returning:
            return self._told(self.run.write(self._prune_telling, values).rows)
        # Without RETURNING they are read before: of a key that is past its retention nobody needs the body, also
        # where another pruner, or a new claim, is quicker than this one.
        read = self.run.read(self._doomed_bodies, values).rows
        return Deleted(self.run.write(self._prune, values).count, rows.named(row.headers for row in read))

    def tokens_in_use(self) -> Iterator[str]:
        """The fencing tokens of all keys that may need a body elsewhere, read page by page in the order of ids."""
        page: Sequence[sa.Row[Any]] = ()
        last = -1
        while not page or len(page) == PAGE:
            page = self.run.read(self._in_use, {"last_id": last, "page": PAGE}).rows
            if not page:
                return
            yield from (row.token for row in page if row.token is not None)
            last = page[-1].id

    # Parts

    def _claim_once(self, asking: Asking) -> Claim | Stored | None:
        """Look, then insert where nothing was found; ``None``: somebody inserted in between.

        The unique index decides the race. The look-up before it is one statement more for a first run, so
        that a replay stays a reader and never queues for the database's writer.
        """
        for row, stored in self._look(asking.scope, asking.key):
            return rows.found(row, asking, stored)
        outcome = self._inserted({**asked(asking), **self._times(asking.retention)})
        if outcome is None or outcome.inserted is None:
            return None
        return rows.claim_of(asking, int(outcome.inserted[0]))

    def _inserted(self, values: dict[str, Any]) -> Outcome | None:
        """Insert a claim; ``None``, or no row counted, where the key is there by now."""
        return self.run.write(self._insert, values)

    def _look(self, scope: str, key: str) -> Iterator[tuple[sa.Row[Any], Stored]]:
        """The row of a key, if there is one, with its value."""
        for row in self.run.read(self._find, {"asked_scope": scope, "asked_key": key}).rows:
            yield row, rows.stored_of(row, scope, key, self._judged(row))

    def _taken(self, outcome: Outcome, asking: Asking) -> Claim | None:
        found = outcome.rows
        if not found and (outcome.count == 1 or outcome.repeated):
            # Without RETURNING the row is read back; after a lost reply this tells whether it was one's own.
            found = self.run.read(self._own, asked(asking)).rows
        return rows.claim_of(asking, found[0].id, found[0].attempts) if found else None

    def _alive(self, claim: Claim, started: float) -> bool:
        """Whether the claim is good for a whole lease, or at least still one's own.

        The lease runs from the moment at which the database granted it. A reply that was long on its way,
        or a statement that waited for another one's transaction, may have used it up.
        """
        if time.monotonic() - started < claim.lock_timeout / 3:
            return True
        return bool(self.renew([claim]))

    def _renew_some(self, claims: Sequence[Claim]) -> set[str]:
        tokens = {claim.token for claim in claims}
        values = {"held_ids": [claim.id for claim in claims], "held_tokens": list(tokens)}
        outcome = self.run.reserved.write(self._renew, {**values, **self._times()})
        if not self.returning:
            if outcome.count == len(tokens):
                return tokens
            outcome = self.run.reserved.read(self._renewed, values)
        return {row.fencing_token for row in outcome.rows}

    # Statements

    @statement
    def _insert(self) -> sa.Insert:
        return self._inserting(self._insert_values())

    @statement
    def _find(self) -> sa.Select[Any]:
        c = self.table.c
        return sa.select(*(c[name] for name in rows.COLUMNS), *self._judging()).where(self._at_key())

    @statement
    def _own(self) -> sa.Executable:
        c = self.table.c
        mine = c.fencing_token == sa.bindparam("asked_token")
        return sa.select(c.id, c.attempts).where(self._at_key(), self._running(), mine)

    @statement
    def _fresh(self) -> sa.Executable:
        return self._taking(self._new_again()).values(self._fresh_values())

    @statement
    def _takeover(self) -> sa.Executable:
        c = self.table.c
        # Never for another fingerprint: whoever sends another request waits for the retention's end.
        same = sa.and_(
            c.request_fingerprint == sa.bindparam("asked_fingerprint"),
            c.fingerprint_version == sa.bindparam("asked_version"),
        )
        return self._taking(same, self._claimable()).values(self._takeover_values())

    @statement
    def _record(self) -> sa.Update:
        # A claim that was given up or is held has no holder any more. A record that is repeated, its reply
        # having been lost, finds itself completed.
        recordable = self.table.c.status.in_([constant(Status.IN_PROGRESS.value), constant(Status.COMPLETED.value)])
        return sa.update(self.table).where(self._by_holder(), recordable).values(self._record_values())

    @statement
    def _renew(self) -> sa.Executable:
        renewal = sa.update(self.table).where(self._renewable()).values(locked_at=self.clock.now)
        return renewal.returning(self.table.c.fencing_token) if self.returning else renewal

    @statement
    def _renewed(self) -> sa.Executable:
        return sa.select(self.table.c.fencing_token).where(self._among_held())

    @statement
    def _prunable(self) -> sa.Executable:
        return sa.select(sa.func.count()).select_from(self.table).where(self._past_retention())

    @statement
    def _prune(self) -> sa.Delete:
        return sa.delete(self.table).where(self.table.c.id.in_(self._doomed()))

    @statement
    def _prune_telling(self) -> sa.Executable:
        """Where the database can delete and tell what."""
        return self._prune.returning(self._body_headers())

    @statement
    def _doomed_bodies(self) -> sa.Executable:
        c = self.table.c
        return sa.select(self._body_headers()).where(c.id.in_(self._doomed()), c.response_body.is_(sa.null()))

    @statement
    def _in_use(self) -> sa.Executable:
        c = self.table.c
        elsewhere = sa.and_(c.response_body.is_(sa.null()), c.response_headers.is_not(sa.null()))
        needed = sa.or_(c.status != constant(Status.COMPLETED.value), elsewhere)
        # All rows of a page come, with nothing of most of them: looking on for those that matter could take as long
        # as there are others between.
        return (
            sa.select(c.id, sa.case((needed, c.fencing_token)).label("token"))
            .where(c.id > sa.bindparam("last_id", type_=c.id.type))
            .order_by(c.id)
            .limit(sa.bindparam("page", type_=sa.Integer()))
        )

    def _recording(self) -> sa.Executable | Message:
        """How :attr:`_record` is sent."""
        return self._record

    # Their parts

    def _inserting(self, values: dict[str, Any]) -> sa.Insert:
        """An insert that does nothing where the key is there, if the database can be told so."""
        return sa.insert(self.table).values(values)

    def _taking(self, *conditions: sa.ColumnElement[bool]) -> sa.Update:
        c = self.table.c
        taking = sa.update(self.table).where(self._at_key(), c.fencing_token == sa.bindparam("seen_token"), *conditions)
        return taking.returning(c.id, c.attempts) if self.returning else taking

    def _among_held(self) -> sa.ColumnElement[bool]:
        """Found by the primary key; the tokens are the proof."""
        c = self.table.c
        return sa.and_(
            self._among(c.id, "held_ids"),
            self._among(c.fencing_token, "held_tokens"),
            self._running(),
        )

    def _renewable(self) -> sa.ColumnElement[bool]:
        """The rows to renew, of those that are to be."""
        return self._among_held()

    def _told(self, deleted: Sequence[sa.Row[Any]]) -> Deleted:
        """What the statement tells that names the bodies."""
        return Deleted(len(deleted), rows.named(row.headers for row in deleted))

    def _past_retention(self) -> sa.ColumnElement[bool]:
        return self._expired(self.clock.reached(self.table.c.expires_at))

    def _doomed(self) -> sa.Select[Any]:
        c = self.table.c
        limit = sa.bindparam("batch_size", type_=sa.Integer())
        return sa.select(c.id).where(self._past_retention()).order_by(c.expires_at).limit(limit)
