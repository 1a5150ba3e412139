"""A unit of work: one operation's transaction, with the app's own session bound to it (atomic mode).

The session stays the app's, so that what hooks have loaded stays attached. For the view's time it works on one
connection, within savepoints, inside a transaction that only the extension ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from threading import get_ident
from typing import Any
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from .changes import has_settings, wrote
from .claim import Asking, Claim, Status, Stored, in_hand
from .errors import CommitUnknown, ConfigurationError, RecordRefused, StoreError, WorkPending
from .recorded import Recorded
from .signals import logger
from .store import failures
from .store.inside import Inside
from .store.sqlalchemy import SQLAlchemyStore

Refused = Callable[[RecordRefused], None]

_PENDING = (
    "Functions that ran before the atomic view left uncommitted writes in db.session. They are not part of the "
    "operation, and would be lost with it if it fails: commit or roll them back there."
)
_SETTINGS = (
    "Functions that ran before an atomic view made settings (SET, set_config) in db.session's transaction, which ends "
    "before the view: they do not hold in it. Make them in a listener for the session's event after_begin, which is "
    "called for each transaction."
)
_OTHER_BIND = (
    "db.session is not bound to the app's engine itself, but to a connection or to an engine with other options, so "
    "that its work can't be in one transaction with the record. Atomic mode needs Flask-SQLAlchemy's own binding."
)
_REPLACED = (
    "The atomic view's session was replaced by another one (db.session.remove()), whose work is not part of the "
    "operation. Leave the session in place; db.session.rollback() brings it back to the last commit."
)

#: The engines for which it was said that settings end.
_told: WeakSet[sa.Engine] = WeakSet()
#: The unit that this context's session works in.
_bound: ContextVar[Unit | None] = ContextVar("flask_idempotency_unit", default=None)


class Unit:
    """The transaction of one operation. For the lifecycle it is the desk where the claim is asked for.

    :param sessions: gives this context's session: the app's scoped session, or any function that does.
    :param engine: the session's default engine, in whose database the record's table is.
    """

    def __init__(self, sessions: Callable[[], Session], engine: sa.Engine, store: SQLAlchemyStore) -> None:
        self._sessions = sessions
        self._engine = engine
        self._store = store
        self._session = sessions()
        self._bind = self._session.get_bind()
        self._connection: sa.Connection | None = None
        self._inside: Inside | None = None
        self._unbind: Callable[[], None] | None = None
        self._scope: Any = None
        self._outer: Unit | None = None

    # As a desk

    def claim(self, asking: Asking) -> Claim | Stored:
        """Take a key that is not there, in a transaction that is kept open for the view; or return what is.

        :raises WorkPending: the app's session has uncommitted writes.
        :raises StoreError: the database can't answer, or its one writer was taken for too long.
        """
        answered = self._answered_before(asking)
        if answered is not None:
            return answered
        found = self._entered(asking)
        if isinstance(found, Claim):
            return found
        if found is None:
            # Whoever has the lock shows nothing before its commit. What has been committed is for all to see.
            self.undo()
            return self._answer(asking) or in_hand(asking)
        if not (found.stale or found.expired or found.status is Status.RELEASED):
            self.undo()
        return found

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored``, within the transaction; ``None``: somebody else was first."""
        claim = None if self._inside is None else self._inside.take(asking, stored)
        if claim is None:
            self.undo()
        return claim

    # Around the view

    def bind(self) -> None:
        """Let the session work within the transaction from now on.

        ``get_bind`` of the instance gives the connection where it would give the default engine; what belongs to
        another bind goes its own way.
        """
        session, connection, engine = self._session, self._connection, self._engine
        own = vars(session).get("get_bind")
        get_bind, mode = session.get_bind, session.join_transaction_mode

        def bound(*args: Any, **kwargs: Any) -> Any:
            found = get_bind(*args, **kwargs)
            return connection if found is engine else found

        def unbind() -> None:
            if own is None:
                del session.get_bind
            else:
                session.get_bind = own  # type: ignore[method-assign]
            session.join_transaction_mode = mode

        session.get_bind = bound  # type: ignore[method-assign]
        session.join_transaction_mode = "create_savepoint"
        self._unbind = unbind
        if not sa.event.contains(Session, "after_begin", _refuse_another):
            sa.event.listen(Session, "after_begin", _refuse_another)
        self._scope, self._outer = _scope_of(self._sessions), _bound.get()
        _bound.set(self)

    def finish(
        self, claim: Claim, asking: Asking, recorded: Recorded, retention: float, refused: Refused | None = None
    ) -> bool:
        """Commit the view's work and the answer together, and give the connection back.

        False: somebody else has the key by now, and nothing is committed yet.

        :param refused: is told why the database can't hold the answer, where that is so.
        :raises Undone: all of it was undone because of a concurrent transaction.
        :raises CommitUnknown: the connection was lost meanwhile.
        :raises sqlalchemy.exc.DBAPIError: the database refused. Nothing is left.
        """
        if self.replaced():
            raise WorkPending(_REPLACED)
        if self._session.in_transaction() or _has_unflushed(self._session):
            try:
                self._session.commit()
            except sa.exc.DBAPIError as error:
                if failures.is_conflict(error):
                    raise failures.undone(error) from error
                raise
        assert self._inside is not None
        try:
            kept = self._inside.finish(claim, asking, recorded, retention, refused)
        except CommitUnknown:
            self._leave()
            raise
        if kept:
            self._leave()
        return kept

    def replaced(self) -> bool:
        """Whether the app's session is another one by now, where it was bound. Elsewhere it is another one anyway."""
        try:
            scope = _scope_of(self._sessions)
        except RuntimeError:
            return False  # outside of the app's contexts, where it has no session
        return scope == self._scope and not self.is_here()

    def is_here(self) -> bool:
        """Whether the app's session of this context is the one that was bound."""
        try:
            return self._sessions() is self._session
        except RuntimeError:
            return False  # outside of the app's contexts

    def record_alone(
        self, asking: Asking, recorded: Recorded, retention: float, refused: Refused | None = None
    ) -> bool:
        """After :meth:`undo`: write the answer without any work. False: somebody else was quicker."""
        try:
            found = self.claim(asking)
            # What was there before, expired or left by somebody who is gone, is there again.
            claim = found if isinstance(found, Claim) else self.take(asking, found)
            if claim is None or self._inside is None:
                return False
            return self._inside.finish(claim, asking, recorded, retention, refused)
        finally:
            self.undo()

    def committed(self, asking: Asking) -> bool:
        """After ``CommitUnknown``: whether the commit was carried out, as one's own token in the table shows."""
        found = self._store.find(asking.scope, asking.key)
        return found is not None and found.token == asking.token and found.status is Status.COMPLETED

    def undo(self) -> None:
        """Roll everything back and give the connection back. Never raises; may be called again."""
        if self._unbind is not None:
            # Expires what the session holds: it is read anew, as the database has it.
            with suppress(Exception):
                self._session.rollback()
        if self._inside is not None:
            self._inside.rollback()
        self._leave()

    # Parts

    def _answered_before(self, asking: Asking) -> Stored | None:
        """On SQLite, a look before the transaction: a replay does not have to queue for the writer."""
        if self._engine.dialect.name != "sqlite" or not self._store.separate:
            return None
        return self._answer(asking)

    def _answer(self, asking: Asking) -> Stored | None:
        """What is recorded under the key, for all to see."""
        found = self._store.find(asking.scope, asking.key)
        return found if found and found.status is Status.COMPLETED and not found.expired else None

    def _entered(self, asking: Asking, again: bool = True) -> Claim | Stored | None:
        inside = self._begun()
        try:
            return inside.enter(asking)
        except StoreError:
            # A connection of the pool's that a restart of the database has broken. Nothing was done on it.
            broken = self._connection is not None and self._connection.invalidated
            self.undo()
            if not (broken and again):
                raise
        return self._entered(asking, again=False)

    def _begun(self) -> Inside:
        if self._bind is not self._engine:
            raise ConfigurationError(_OTHER_BIND)
        if _has_unflushed(self._session) or any(wrote(one) for one in self._open()):
            raise WorkPending(_PENDING)
        self._warn_of_settings()
        transaction = self._session.get_transaction()
        if transaction is not None:
            # Reads alone. Ended, they give the one connection of a small pool back; nothing loaded is expired.
            transaction.close()
        self._store.refuse_own()
        self._connection = self._connected()
        try:
            self._inside = self._store.inside(self._connection)
            self._inside.begin()
        except BaseException:
            self._leave()
            raise
        return self._inside

    def _warn_of_settings(self) -> None:
        if self._engine in _told or not any(has_settings(one) for one in self._open()):
            return
        # An app that has a listener makes them there, for the hooks' transaction as for the view's.
        if any(one is not _refuse_another for one in self._session.dispatch.after_begin):
            return
        _told.add(self._engine)
        logger.warning(_SETTINGS)

    def _connected(self) -> sa.Connection:
        try:
            return self._store.connect()
        except sa.exc.TimeoutError as error:
            raise StoreError(f"All connections of the app's pool were in use for too long. ({error})") from error
        except Exception as error:
            raise failures.store_error(error, self._store.table, self._engine) from error

    def _open(self) -> list[sa.Connection]:
        """The connections of the session's transaction, on all its binds: all that ends with it."""
        transaction = self._session.get_transaction()
        # SQLAlchemy has no public way to ask which connections there are, without opening one.
        return [] if transaction is None else [entry[0] for entry in transaction._connections.values()]

    def _leave(self) -> None:
        connection, self._connection, self._inside = self._connection, None, None
        try:
            if self._unbind is not None:
                unbind, self._unbind = self._unbind, None
                _bound.set(self._outer)
                unbind()
        finally:
            if connection is not None:
                with suppress(Exception):
                    connection.close()


def in_use() -> bool:
    """Whether this context's session works within an atomic view's transaction."""
    unit = _bound.get()
    return unit is not None and unit._unbind is not None and unit.is_here()


def _refuse_another(session: Session, *_: Any) -> None:
    """Raise before a session that took a bound one's place does any work: that could not be rolled back."""
    unit = _bound.get()
    if unit is None or unit._unbind is None or session is unit._session:
        return
    if unit.replaced() and unit._sessions() is session:
        raise WorkPending(_REPLACED)


def _scope_of(sessions: Callable[[], Session]) -> Any:
    """What a session belongs to: Flask-SQLAlchemy gives each app context one. One without a scope can't be replaced."""
    return getattr(sessions.registry, "scopefunc", get_ident)() if isinstance(sessions, scoped_session) else object()


def _has_unflushed(session: Session) -> bool:
    return bool(session.new or session.deleted) or any(session.is_modified(one) for one in session.dirty)
