"""Atomic mode on PostgreSQL: one operation within one transaction of the app's own."""

from __future__ import annotations

from sqlalchemy import exc

from ..errors import CommitUnknown, StoreError
from . import failures
from .inside import ENDED, Inside

_ABORTED = (
    "A statement of the guarded view has failed, and nothing has brought the transaction back to a savepoint "
    "(db.session.rollback()): the database would not commit it."
)
#: libpq's states of a transaction, as psycopg2 and psycopg 3 number them.
_IDLE, _IN_ERROR = 0, 3


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
            raise StoreError(ENDED)
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
