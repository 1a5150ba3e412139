"""Atomic mode on SQLite: one operation within one transaction of the app's own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy import exc

from ..errors import StoreError
from . import failures
from .atomic import Atomic
from .inside import ENDED, Inside
from .writer import PATIENCE

_SHARED = (
    "Another thread's atomic operation was on the in-memory SQLite database, whose one connection everybody shares, "
    "for too long. Keep transactions short, or use a database file."
)

#: In memory: whoever is in an atomic transaction on the one connection of that pool.
_alone: weakref.WeakKeyDictionary[sa.Pool, _Alone] = weakref.WeakKeyDictionary()
_finding = threading.Lock()


class _Alone:
    """The right to be in an atomic transaction on a connection that everybody shares, and the thread that has it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None


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
            raise StoreError(ENDED)

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
