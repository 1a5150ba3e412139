"""Atomic mode on PostgreSQL: one operation within one transaction of the app's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import exc

from ..claim import Asking, Claim
from ..errors import RecordRefused, StoreError
from ..recorded import Recorded
from . import failures, framing
from .framing import IDLE, IN_ERROR
from .inside import ENDED, Inside

_ABORTED = (
    "A statement of the guarded view has failed, and nothing has brought the transaction back to a savepoint "
    "(db.session.rollback()): the database would not commit it."
)


class InsidePostgreSQL(Inside):
    """The lock goes with the transaction, however that ends."""

    def finish(
        self,
        claim: Claim,
        asking: Asking,
        recorded: Recorded,
        retention: float,
        refused: Callable[[RecordRefused], None] | None = None,
    ) -> bool:
        """Write the answer and commit: in one message, where nothing has to be learned in between."""
        frame = self._backend.frame
        if frame is None or frame.by_driver or claim.id:
            return super().finish(claim, asking, recorded, retention, refused)
        self._assert_sound()
        try:
            kept = self._backend.keep(claim, asking, recorded, retention, refused, last=True)
            if kept:
                # For SQLAlchemy and its listeners; the driver has nothing to commit.
                super()._commit()
        except BaseException:
            self.rollback()
            raise
        if kept:
            self._leave()
        return kept

    def _begin(self) -> None:
        if getattr(self._driver, "autocommit", False) is True:
            # An app that lives in autocommit gets a transaction here all the same. Its pool resets this.
            default = self._connection.default_isolation_level
            self._connection = self._connection.execution_options(isolation_level=default)
        else:
            self._backend.frame = framing.begin(self._connection)
        super()._begin()

    def _assert_sound(self) -> None:
        super()._assert_sound()
        state = getattr(getattr(self._driver, "info", None), "transaction_status", None)
        if state == IDLE:
            raise StoreError(ENDED)
        if state == IN_ERROR:
            # PostgreSQL answers a COMMIT by rolling back, and calls that a success.
            raise StoreError(_ABORTED)

    def _commit(self) -> None:
        frame = self._backend.frame
        try:
            if frame is not None and not frame.by_driver:
                self._connection.exec_driver_sql("COMMIT")
            super()._commit()
        except exc.DBAPIError as error:
            raise failures.of_commit(error) from error

    def _roll_back(self) -> None:
        if self._backend.frame is not None:
            self._backend.frame.end()
        super()._roll_back()

    def _leave(self) -> None:
        super()._leave()
        frame, self._backend.frame = self._backend.frame, None
        if frame is not None:
            with suppress(Exception):  # a connection that is lost has nothing to end
                frame.end()
