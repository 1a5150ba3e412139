"""Atomic mode's statements: what a key goes through within one transaction of the app's own."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from ..claim import Asking, Claim, Stored
from ..errors import RecordRefused, StoreError, Undone
from ..recorded import Recorded
from . import failures, rows
from .backend import Backend
from .executor import Executor, Outcome, ValueRefused, carried_out
from .postgresql import PostgreSQLBackend
from .sqlite import SQLiteBackend
from .terms import asked, held, statement

A = TypeVar("A", bound="Atomic")
T = TypeVar("T")

_NAMESPACE = "flask-idempotency: one operation"
#: Drivers that send a text of two statements as one message, and give the last one's result.
_DRIVERS = ("psycopg2", "psycopg")
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


class Bound(Executor):
    """Runs statements within the transaction of a connection of the app's: none is repeated, none is committed.

    A statement that fails leaves PostgreSQL's transaction fit for nothing but its rollback.
    """

    def __init__(self, connection: sa.Connection, table: sa.Table) -> None:
        # Nothing of Executor's own: it has no connections, and what SQLite's writer is at was seen to at the beginning.
        self._connection = connection
        self._own = connection.engine
        self._table = table
        self._watch = None
        self.dialect_name = connection.dialect.name
        self.separate = False
        self.reserved = self

    def close(self) -> None:
        """Nothing: the connection is the app's."""

    def message(self, text: str, values: Mapping[str, Any]) -> sa.Row[Any]:
        """Send PostgreSQL several statements in one message, in the driver's own spelling; returns the last one's row.

        Each of them has a snapshot of its own, as if they had been sent one by one.
        """

        def send() -> sa.Row[Any]:
            with _client_side(self._connection):
                return self._connection.exec_driver_sql(text, dict(values)).one()

        return self._explaining(send, StoreError)

    def _persist(
        self, statement: sa.Executable, values: Mapping[str, Any], refused: type[StoreError], writes: bool = False
    ) -> Outcome:
        return self._explaining(lambda: carried_out(self._connection, statement, values), refused)

    def _explaining(self, action: Callable[[], T], refused: type[StoreError]) -> T:
        try:
            with _unprepared(self._connection):
                return action()
        except ValueRefused as error:
            raise error.named(refused) from error.__cause__
        except StoreError:
            raise
        except Exception as error:
            if failures.is_conflict(error):
                raise failures.undone(error) from error
            raise self._explained(error) from error


class Atomic(Backend):
    """What both databases have in common: the row is written once, complete, unless one had to be there before."""

    def within(self: A, connection: sa.Connection) -> A:
        """The same statements, run on that connection."""
        bound = copy.copy(self)
        bound.run = Bound(connection, self.table)
        return bound

    def enter(self, asking: Asking) -> Claim | Stored | None:
        """Take a key that is not there, or return what is; ``None``: somebody is at it, or was first."""
        found = self.find(asking.scope, asking.key)
        return rows.claim_of(asking, 0) if found is None else found

    def keep(
        self,
        claim: Claim,
        asking: Asking,
        recorded: Recorded,
        retention: float,
        refused: Callable[[RecordRefused], None] | None = None,
    ) -> bool:
        """Store the answer, or where the database can't hold it, that there was one; False: the key is there by now.

        :param refused: is told why the answer itself is not stored.
        """
        refusal = self._refusal(recorded)
        if refusal is None:
            try:
                return self._kept_once(claim, asking, recorded, retention)
            except RecordRefused as error:
                # By the driver, before anything was sent. Had it been the database, what follows fails as well.
                refusal = error
        kept = self._kept_once(claim, asking, recorded.without_answer(), retention)
        if kept and refused is not None:
            refused(refusal)
        return kept

    def _refusal(self, recorded: Recorded) -> RecordRefused | None:
        """What the database would say to an answer that it can't hold, where it must not be asked."""
        return None

    def _kept_once(self, claim: Claim, asking: Asking, recorded: Recorded, retention: float) -> bool:
        if claim.id:
            return self.record(claim, recorded, retention)
        values = {**asked(asking), **self._times(retention), **rows.answer_parameters(recorded)}
        values["asked_retention"] = retention
        return self.run.write(self._complete, values, refused=RecordRefused).count == 1

    def _alive(self, claim: Claim, started: float) -> bool:
        """A claim that nobody else can see has no lease that could run out."""
        return True

    @statement
    def _complete(self) -> sa.Executable:
        complete = self._inserting({**self._insert_values(), **self._record_values()})
        return complete.inline().execution_options(preserve_rowcount=True)


class AtomicSQLite(Atomic, SQLiteBackend):
    """The transaction has the database's only writer: whatever it looks at stays as it is."""


@dataclass(slots=True)
class _Known:
    """What earlier transactions have shown; all of an engine's are of the same kind, usually."""

    strict: bool = False
    message: sa.Compiled | None = None


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
            return super().take(asking, stored)
        except Undone:
            return None

    def _refusal(self, recorded: Recorded) -> RecordRefused | None:
        # An error of the database's would cost the whole transaction.
        return None if _holdable(recorded) else RecordRefused(_NOT_HOLDABLE)

    def _kept_once(self, claim: Claim, asking: Asking, recorded: Recorded, retention: float) -> bool:
        if self._place is None:
            return super()._kept_once(claim, asking, recorded, retention)
        values = {**held(claim), **self._times(retention), **rows.answer_parameters(recorded)}
        values.update(asked_retention=retention, held_place=self._place)
        return self.run.write(self._complete_early, values, refused=RecordRefused).count == 1

    def _insert_first(self, asking: Asking) -> Claim | None:
        values = {**asked(asking), "lock": lock_number(asking.scope, asking.key)}
        for row in self.run.write(self._early, values).rows:
            self._known.strict, self._place = row.level in _STRICT, row.place
            return rows.claim_of(asking, row.id)
        return None

    def _look_first(self, asking: Asking) -> Claim | Stored | None:
        assert isinstance(self.run, Bound)
        look = self._in_one_message if _sends_messages(self.run._connection) else self._one_by_one
        locked, level, row = look(self.run, asking)
        self._known.strict = level in _STRICT
        if not locked:
            return None
        if row is not None:
            return rows.stored_of(row, asking.scope, asking.key, self._judged(row))
        return self._insert_first(asking) if self._known.strict else rows.claim_of(asking, 0)

    def _in_one_message(self, run: Bound, asking: Asking) -> tuple[bool, str, Any]:
        if self._known.message is None:
            self._known.message = self._looking.compile(dialect=run._connection.dialect)
        message = self._known.message
        values = {"lock": lock_number(asking.scope, asking.key), "name": _LOCKED}
        looking = message.construct_params({"asked_scope": asking.scope, "asked_key": asking.key}) or {}
        lock = "SELECT set_config(%(name)s, pg_try_advisory_xact_lock(%(lock)s)::text, true)"
        row = run.message(f"{lock};\n{message}", {**looking, **values})
        return row.locked, row.level, None if row.id is None else row

    def _one_by_one(self, run: Bound, asking: Asking) -> tuple[bool, str, Any]:
        (entry,) = run.read(self._lock, {"lock": lock_number(asking.scope, asking.key)}).rows
        found = run.read(self._find, {"asked_scope": asking.scope, "asked_key": asking.key}).rows
        return entry.locked, entry.level, found[0] if found else None

    @statement
    def _lock(self) -> sa.Executable:
        return sa.select(self._locking().label("locked"), self._level())

    @statement
    def _looking(self) -> sa.Select[Any]:
        locked = sa.cast(sa.func.current_setting(_LOCKED), sa.Boolean()).label("locked")
        entry = sa.select(locked, self._level()).subquery("entry")
        found = self._find.subquery("found")
        return sa.select(*entry.c, *found.c).select_from(entry.outerjoin(found, sa.true()))

    @statement
    def _early(self) -> sa.Executable:
        c = self.table.c
        values = self._insert_values()
        new = sa.select(*(value.label(name) for name, value in values.items())).where(self._locking())
        return (
            postgresql.insert(self.table)
            .from_select(list(values), new, include_defaults=False)
            .on_conflict_do_nothing(index_elements=[c.scope, c.key])
            .returning(c.id, self._level(), sa.cast(sa.literal_column("ctid"), sa.String()).label("place"))
        )

    @statement
    def _complete_early(self) -> sa.Executable:
        # Under SERIALIZABLE finding the row by an index, or by looking through a small table, would count as reading
        # what the operations of other keys write, and they would undo each other. Nobody else can move it.
        return (
            sa.update(self.table)
            .where(sa.text("ctid = CAST(:held_place AS tid)"), self._by_holder())
            .values(self._record_values())
        )

    def _locking(self) -> sa.ColumnElement[bool]:
        return sa.func.pg_try_advisory_xact_lock(sa.bindparam("lock", type_=sa.BigInteger()), type_=sa.Boolean())

    def _level(self) -> sa.Label[str]:
        return sa.func.current_setting("transaction_isolation", type_=sa.String()).label("level")


def _sends_messages(connection: sa.Connection) -> bool:
    dialect = connection.dialect
    return (
        dialect.driver in _DRIVERS
        and (dialect.driver == "psycopg2" or hasattr(dialect.dbapi, "ClientCursor"))
        # Which schemas are meant is known to SQLAlchemy alone.
        and not connection.get_execution_options().get("schema_translate_map")
    )


@contextmanager
def _client_side(connection: sa.Connection) -> Iterator[None]:
    """Let psycopg 3 put the values into the text, as psycopg2 does: PostgreSQL takes values for one statement only."""
    if connection.dialect.driver != "psycopg":
        yield
        return
    driver: Any = connection.connection.dbapi_connection
    module: Any = connection.dialect.dbapi
    before = driver.cursor_factory
    driver.cursor_factory = _last_result(module)
    try:
        yield
    finally:
        driver.cursor_factory = before


@functools.cache
def _last_result(driver: Any) -> type[Any]:
    class LastResult(driver.ClientCursor):  # type: ignore[misc]
        """Stands at the last statement's result, not at the first one's."""

        def execute(self, *args: Any, **kwargs: Any) -> Any:
            super().execute(*args, **kwargs)
            while self.nextset():
                pass
            return self

    return LastResult


@contextmanager
def _unprepared(connection: sa.Connection) -> Iterator[None]:
    """Keep psycopg 3 from preparing what it sees often: behind a transaction-pooling proxy that would not be found."""
    driver: Any = connection.connection.dbapi_connection
    if not hasattr(driver, "prepare_threshold"):
        yield
        return
    before = driver.prepare_threshold
    driver.prepare_threshold = None
    try:
        yield
    finally:
        driver.prepare_threshold = before


def _holdable(recorded: Recorded) -> bool:
    """Whether PostgreSQL can hold the answer's texts: no NUL, and nothing that is no character."""
    texts = [recorded.reason or "", *(text for header in recorded.headers for text in header)]
    return not any("\x00" in text or any("\ud800" <= c <= "\udfff" for c in text) for text in texts)
