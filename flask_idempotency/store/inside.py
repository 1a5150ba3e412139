"""One operation within one transaction of the app's own, from its beginning to its commit (atomic mode)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from ..claim import Asking, Claim, Stored
from ..errors import RecordRefused, StoreError
from ..recorded import Recorded
from . import failures
from .atomic import Atomic

ENDED = (
    "The app's transaction has ended in the middle of the guarded view, by a statement of its own (COMMIT, ROLLBACK) "
    "or by the database, so that the record can't be part of it. End savepoints only (db.session.commit())."
)


class Inside:
    """One operation within one transaction of a connection of the app's own pool (atomic mode).

    Call :meth:`begin`, then :meth:`enter`. With a claim (:meth:`take` may give one for what was found) let the app
    work on the connection, within savepoints, then :meth:`finish`. In all other cases, and whatever is raised, call
    :meth:`rollback`. The connection is closed by whoever opened it, and earlier, when the operation has ended, only if
    it is the one connection of SQLite in memory.

    :param connection: fresh from the store's own ``connect``: no transaction has begun on it.
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

    def finish(
        self,
        claim: Claim,
        asking: Asking,
        recorded: Recorded,
        retention: float,
        refused: Callable[[RecordRefused], None] | None = None,
    ) -> bool:
        """:meth:`record`, and if that is true, :meth:`commit`."""
        kept = self.record(claim, asking, recorded, retention, refused)
        if kept:
            self.commit()
        return kept

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
            raise StoreError(ENDED)

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
