"""Atomic mode's statements: what a key goes through within one transaction of the app's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc

from ..claim import Asking, Claim, Stored
from ..errors import RecordRefused, StoreError
from ..recorded import Recorded
from . import failures, rows
from .backend import Backend
from .executor import Executor, Outcome, ValueRefused, carried_out
from .framing import IDLE, Frame
from .message import Message
from .sqlite import SQLiteBackend
from .terms import asked, statement

A = TypeVar("A", bound="Atomic")
T = TypeVar("T")


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

    def conclude(self, last: Message, values: Mapping[str, Any]) -> bool:
        """Send the message that ends PostgreSQL's transaction. False: the record's key is there by now.

        :raises ValueRefused: the driver, or the database, can't hold a value.
        :raises Undone: the database undid all of it because of a concurrent transaction.
        :raises CommitUnknown: the connection was lost meanwhile.
        :raises sqlalchemy.exc.DBAPIError: the database refused to commit. Nothing is left.
        """
        driver: Any = self._connection.connection.dbapi_connection
        try:
            last.send(self._connection, values)
        except Exception as error:
            if isinstance(error, exc.DBAPIError):
                told = failures.of_commit(error)
                # Where the transaction is over, it was COMMIT that failed; else the record.
                if told is not error or driver.info.transaction_status == IDLE:
                    raise told from error
            if failures.is_taken(error, self._table):
                return False
            if failures.is_value(error):
                raise ValueRefused from error
            raise self._explained(error) from error
        return True

    def _persist(
        self,
        statement: sa.Executable | Message,
        values: Mapping[str, Any],
        refused: type[StoreError],
        writes: bool = False,
    ) -> Outcome:
        return self.explaining(lambda connection: carried_out(connection, statement, values), refused)

    def looked(self, look: Callable[[sa.Connection], T]) -> T:
        """What ``look`` finds, within the transaction."""
        return self.explaining(look)

    def explaining(self, action: Callable[[sa.Connection], T], refused: type[StoreError] = StoreError) -> T:
        """What ``action`` does on the connection, with its failures named."""
        try:
            with _unprepared(self._connection):
                return action(self._connection)
        except ValueRefused as error:
            raise error.named(refused) from error.__cause__
        except StoreError:
            raise
        except Exception as error:
            if failures.is_conflict(error):
                raise failures.undone(error) from error
            raise self._explained(error) from error


class Atomic(Backend):
    """What both databases have in common: the row is written once, complete, unless one had to be there before.

    :ivar frame: how the operation's transaction is framed on PostgreSQL; ``None``: by the driver.
    """

    frame: Frame | None = None

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
        last: bool = False,
    ) -> bool:
        """Store the answer, or where the database can't hold it, that there was one; False: the key is there by now.

        :param refused: is told why the answer itself is not stored.
        :param last: to be written in the message that commits.
        """
        refusal = self._refusal(recorded)
        if refusal is None:
            try:
                return self._kept_once(claim, asking, recorded, retention, last)
            except RecordRefused as error:
                # By the driver, before anything was sent. Had it been the database, what follows fails as well.
                refusal = error
        kept = self._kept_once(claim, asking, recorded.without_answer(), retention, last)
        if kept and refused is not None:
            refused(refusal)
        return kept

    def _refusal(self, recorded: Recorded) -> RecordRefused | None:
        """What the database would say to an answer that it can't hold, where it must not be asked."""
        return None

    def _kept_once(self, claim: Claim, asking: Asking, recorded: Recorded, retention: float, last: bool) -> bool:
        if claim.id:
            return self.record(claim, recorded, retention)
        values = {**asked(asking), **self._times(retention), **rows.answer_parameters(recorded)}
        values["asked_retention"] = retention
        if last:
            return self._concluded(values)
        return self.run.write(self._complete, values, refused=RecordRefused).count == 1

    def _concluded(self, values: Mapping[str, Any]) -> bool:
        """The row and the commit at once. Not on SQLite, where no message is on its way for long."""
        raise NotImplementedError

    def _alive(self, claim: Claim, started: float) -> bool:
        """A claim that nobody else can see has no lease that could run out."""
        return True

    @statement
    def _complete(self) -> sa.Executable:
        complete = self._inserting({**self._insert_values(), **self._record_values()})
        return complete.inline().execution_options(preserve_rowcount=True)


class AtomicSQLite(Atomic, SQLiteBackend):
    """The transaction has the database's only writer: whatever it looks at stays as it is."""


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
