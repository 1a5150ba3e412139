"""One operation within one transaction of the app's own, from its beginning to its commit (atomic mode)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from ..claim import Asking, Claim, Stored
from ..errors import CommitUnknown, ConfigurationError, RecordRefused, StoreError
from ..recorded import Recorded
from . import failures
from .atomic import Atomic, AtomicPostgreSQL, AtomicSQLite
from .backend import Backend
from .postgresql import PostgreSQLBackend
from .sqlite import SQLiteBackend
from .writer import PATIENCE

_ENDED = (
    "The app's transaction has ended in the middle of the guarded view, by a statement of its own (COMMIT, ROLLBACK) "
    "or by the database, so that the record can't be part of it. End savepoints only (db.session.commit())."
)
_ABORTED = (
    "A statement of the guarded view has failed, and nothing has brought the transaction back to a savepoint "
    "(db.session.rollback()): the database would not commit it."
)
_SHARED = (
    "Another thread's atomic operation was on the in-memory SQLite database, whose one connection everybody shares, "
    "for too long. Keep transactions short, or use a database file."
)

#: libpq's states of a transaction, as psycopg2 and psycopg 3 number them.
_IDLE, _IN_ERROR = 0, 3

#: In memory: whoever is in an atomic transaction on the one connection of that pool.
_alone: weakref.WeakKeyDictionary[sa.Pool, _Alone] = weakref.WeakKeyDictionary()
_finding = threading.Lock()


class _Alone:
    """The right to be in an atomic transaction on a connection that everybody shares, and the thread that has it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None


class Inside:
    """One operation within one transaction of a connection of the app's own pool (atomic mode).

    Call :meth:`begin`, then :meth:`enter`. With a claim (:meth:`take` may give one for what was found) let the app
    work on the connection, within savepoints, then :meth:`record` and :meth:`commit`. In all other cases, and
    whatever is raised, call :meth:`rollback`. The connection is closed by whoever opened it, and earlier, when the
    operation has ended, only if it is the one connection of SQLite in memory.

    :param connection: fresh from the app's pool: no transaction has begun on it.
    """

    def __init__(self, connection: sa.Connection, backend: Atomic) -> None:
        self._connection = connection
        self._own = backend.run
        self._backend = backend.within(connection)
        self._transaction: sa.RootTransaction | None = None
        self._driver: Any = None

    def begin(self) -> None:
        """Begin the transaction.

        :raises WriterHeld: the app's own transaction in this thread holds SQLite's writer.
        :raises StoreError: it could not be begun; on SQLite, for somebody else's transaction too.
        """
        try:
            self._driver = self._connection.connection.dbapi_connection
            self._begin()
        except BaseException as error:
            self.rollback()
            if isinstance(error, Exception) and not isinstance(error, StoreError):
                raise self._explained(error) from error
            raise

    def enter(self, asking: Asking) -> Claim | Stored | None:
        """The claim, or what is stored under the key; ``None``: somebody is at it, or was first.

        The claim is this transaction's secret until the commit. After ``None``, roll back, and look for what the
        other one has left with the store's own ``find``.
        """
        return self._backend.enter(asking)

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored``, unless somebody else was first or it is not to be taken. After ``None``, roll back."""
        return self._backend.take(asking, stored)

    def record(
        self,
        claim: Claim,
        asking: Asking,
        recorded: Recorded,
        retention: float,
        refused: Callable[[RecordRefused], None] | None = None,
    ) -> bool:
        """Write the answer, to be kept for ``retention`` seconds. False: somebody else has the key; roll back.

        What the database can't hold is recorded as an answer that could not be kept.

        :param refused: is told of that, and why.
        :raises Undone: the database undid the transaction because of a concurrent one.
        """
        self._assert_sound()
        return self._backend.keep(claim, asking, recorded, retention, refused)

    def commit(self) -> None:
        """Commit the app's work and the record.

        :raises Undone: the database undid all of it because of a concurrent transaction, or SQLite's readers did not
            let it commit within the busy timeout.
        :raises CommitUnknown: the connection was lost; look for one's own token with the store's own ``find``.
        :raises sqlalchemy.exc.DBAPIError: the database refused, a deferred constraint for example. Nothing is left.
        """
        try:
            self._assert_sound()
            self._commit()
        except BaseException:
            self.rollback()
            raise
        self._leave()

    def rollback(self) -> None:
        """Undo what is not committed. Never raises; may be called at any time, and again."""
        try:
            self._roll_back()
        except Exception:
            with suppress(Exception):
                self._connection.invalidate()
        finally:
            self._leave()

    # Parts

    def _begin(self) -> None:
        self._transaction = self._connection.begin()

    def _assert_sound(self) -> None:
        """Raise where a commit would not be of the transaction that was begun."""
        if self._transaction is None or not self._transaction.is_active:
            raise StoreError(_ENDED)

    def _commit(self) -> None:
        assert self._transaction is not None
        self._transaction.commit()

    def _roll_back(self) -> None:
        # Or what the app has put in its place, having ended it.
        current = self._connection.get_transaction() if self._transaction is not None else None
        if current is not None:
            current.rollback()

    def _leave(self) -> None:
        """Leave the driver's connection as it was before. May be called more than once."""
        self._transaction = None

    def _explained(self, error: Exception) -> StoreError:
        return failures.store_error(error, self._backend.table, self._connection.engine)


class InsidePostgreSQL(Inside):
    """The lock goes with the transaction, however that ends."""

    def _begin(self) -> None:
        if getattr(self._driver, "autocommit", False) is True:
            # An app that lives in autocommit gets a transaction here all the same. Its pool resets this.
            default = self._connection.default_isolation_level
            self._connection = self._connection.execution_options(isolation_level=default)
        super()._begin()

    def _assert_sound(self) -> None:
        super()._assert_sound()
        state = getattr(getattr(self._driver, "info", None), "transaction_status", None)
        if state == _IDLE:
            raise StoreError(_ENDED)
        if state == _IN_ERROR:
            # PostgreSQL answers a COMMIT by rolling back, and calls that a success.
            raise StoreError(_ABORTED)

    def _commit(self) -> None:
        try:
            super()._commit()
        except exc.DBAPIError as error:
            if failures.is_conflict(error):
                raise failures.undone(error) from error
            if failures.is_lost(error):
                raise CommitUnknown(
                    f"The connection was lost while the commit was under way. ({failures.cause(error)})"
                ) from error
            raise


class InsideSQLite(Inside):
    """The transaction has the writer from its beginning on, and every statement that frames it is sent by hand.

    The driver's own handling begins a transaction with the first write only, and so does not protect the savepoints
    before it. It is switched off for the transaction's length.
    """

    def __init__(self, connection: sa.Connection, backend: Atomic) -> None:
        super().__init__(connection, backend)
        self._restore: Callable[[], None] | None = None
        self._alone: _Alone | None = None

    def _begin(self) -> None:
        if self._own.separate:
            self._own.refuse_own()
            self._take_over()
        else:
            self._wait_alone()
        with self._own.beside():
            self._take_over()
            self._transaction = self._connection.begin()
            if self._driver.in_transaction:
                # By a listener of the app's, and deferred: too late for the writer once something has been read.
                self._driver.execute("ROLLBACK")
            self._connection.exec_driver_sql("BEGIN IMMEDIATE")
            self._own.hold(self._driver, True)

    def _wait_alone(self) -> None:
        """Two threads' transactions on one connection would be one transaction."""
        with _finding:
            alone = _alone.setdefault(self._connection.engine.pool, _Alone())
        if alone.owner == threading.get_ident():
            self._own.refuse_own()
        if not alone.lock.acquire(timeout=PATIENCE):
            raise StoreError(_SHARED)
        try:
            # Not earlier: another thread's operation on the one connection looks like this thread's own.
            self._own.refuse_own()
        except BaseException:
            alone.lock.release()
            raise
        self._alone, alone.owner = alone, threading.get_ident()

    def _take_over(self) -> None:
        if self._restore is not None:
            return
        driver, autocommit = self._driver, getattr(self._driver, "autocommit", None)
        if isinstance(autocommit, bool):  # of Python 3.12; its "legacy" is a number
            self._restore = lambda: setattr(driver, "autocommit", autocommit)
            driver.autocommit = True
        else:
            level = driver.isolation_level
            self._restore = lambda: setattr(driver, "isolation_level", level)
            driver.isolation_level = None

    def _assert_sound(self) -> None:
        super()._assert_sound()
        if not self._driver.in_transaction:
            raise StoreError(_ENDED)

    def _commit(self) -> None:
        try:
            self._connection.exec_driver_sql("COMMIT")
        except exc.DBAPIError as error:
            if failures.is_locked(error):
                raise failures.undone(error) from error
            raise
        # For SQLAlchemy and its listeners; the driver finds nothing to commit.
        super()._commit()

    def _roll_back(self) -> None:
        if self._transaction is not None:
            if self._driver.in_transaction:
                self._driver.execute("ROLLBACK")
            super()._roll_back()

    def _leave(self) -> None:
        super()._leave()
        restore, self._restore = self._restore, None
        alone, self._alone = self._alone, None
        try:
            if restore is not None:
                with suppress(Exception):  # a connection that is closed has no settings
                    restore()
                self._own.hold(self._driver, False)
        finally:
            if alone is not None:
                # Given back later, the pool would roll back whatever the next one has begun on it by then.
                with suppress(Exception):
                    self._connection.close()
                alone.owner = None
                alone.lock.release()


def atomic_backend(backend: Backend) -> Atomic:
    """The statements of atomic mode beside those of ``backend``.

    :raises ConfigurationError: they are not known for its database.
    """
    if isinstance(backend, PostgreSQLBackend) and supports_atomic(backend):
        return AtomicPostgreSQL(backend.table, backend.run)
    if isinstance(backend, SQLiteBackend):
        return AtomicSQLite(backend.table, backend.run)
    raise ConfigurationError(
        f"Atomic mode is available on PostgreSQL and SQLite, and not on {backend.run.dialect_name!r}. Leave "
        "IDEMPOTENCY_ATOMIC (atomic=True) out, or keep the keys in a database of one of these."
    )


def supports_atomic(backend: Backend) -> bool:
    """Whether atomic mode knows this database. One that only speaks as PostgreSQL does may have other locks."""
    return isinstance(backend, SQLiteBackend) or (
        isinstance(backend, PostgreSQLBackend) and backend.run.dialect_name == "postgresql"
    )


def inside(connection: sa.Connection, backend: Atomic) -> Inside:
    """An operation on that connection."""
    return (InsideSQLite if isinstance(backend, AtomicSQLite) else InsidePostgreSQL)(connection, backend)
