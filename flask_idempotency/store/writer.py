"""Who holds SQLite's only writer: the app's own work in this thread, or somebody else's.

A statement that waited for the app's own transaction, in the thread that would have to end it, would
wait for itself until the busy timeout. So the app's connections are watched as they leave
its pool and come back.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import get_ident, local
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import SingletonThreadPool

from ..errors import WriterHeld

#: How long another thread's work on the same in-memory connection is waited for: SQLite's own default
#: busy timeout in Python.
PATIENCE = 5.0
_PAUSE = 0.005

_HELD = (
    "The app has uncommitted writes in this very thread, and SQLite has one writer: waiting for them would be "
    "waiting for oneself. Commit or roll them back before the guarded view (see the before_request functions that "
    "write through db.session)."
)
_READING = (
    "The app is in a transaction on this SQLite database in this very thread, and without write-ahead logging a "
    "reader keeps the writer waiting: waiting for it would be waiting for oneself. End the transaction before the "
    "guarded view, or switch the database to write-ahead logging (PRAGMA journal_mode=WAL)."
)
_PERHAPS = (
    "SQLite's one writer was held for longer than the busy timeout, and the app is in a transaction in this very "
    "thread, which may be the one that holds it (if it was begun with BEGIN IMMEDIATE). End it before the guarded view."
)
_SHARED = (
    "The app has uncommitted writes on the in-memory SQLite database, whose one connection everybody shares: storing "
    "a key now would commit them. Commit or roll them back first, or use a database file."
)


#: What the app is at work on, a request say, wherever its parts run: coroutines run in threads of their own, to which
#: context variables are copied.
working: ContextVar[object] = ContextVar("flask_idempotency_working", default=None)


@dataclass(slots=True, eq=False)
class _Use:
    """One connection that is out of the app's pool."""

    thread: int
    work: object
    connection: Any
    #: ``total_changes`` when the present transaction can't have begun yet.
    changes: int
    #: Whether its transaction was begun with ``BEGIN IMMEDIATE``, as far as this is known.
    held: bool = False

    @property
    def mine(self) -> bool:
        """Whether whoever asks would have to end its transaction himself."""
        return self.thread == get_ident() or (self.work is not None and self.work is working.get())

    @property
    def writes(self) -> bool:
        """Whether there are uncommitted writes, or are about to be, as far as the driver shows."""
        if not self.in_transaction:
            return False
        if self.held or _changes(self.connection) != self.changes:
            return True
        # The driver's classic mode begins a transaction with the first write only. Under other modes, and
        # recipes that BEGIN by themselves, a reader is in a transaction too.
        return self.connection.isolation_level is not None and getattr(self.connection, "autocommit", -1) == -1

    @property
    def in_transaction(self) -> bool:
        return bool(getattr(self.connection, "in_transaction", False))


def _changes(connection: Any) -> int:
    """Rows written through this connection so far; constant once it is closed."""
    try:
        return int(getattr(connection, "total_changes", 0))
    except Exception:
        return 0


class WriterWatch:
    """Watches the connections of one engine. Of the app's side only; one's own use is kept out with :meth:`own`."""

    def __init__(self, engine: sa.Engine) -> None:
        #: Whether an open reader keeps a writer from committing: in every journal mode but WAL.
        self.readers_block = False
        self._uses: dict[int, list[_Use]] = {}
        self._mine = local()
        self._one_connection = not isinstance(engine.pool, SingletonThreadPool)
        self._listen(engine)

    def refuse_own(self) -> None:
        """Raise :class:`WriterHeld` where this thread's own transaction holds the writer, or holds it off."""
        uses = self._all()
        # The transaction on a connection that several share is the one that has said so.
        others = [use.connection for use in uses if use.held and not use.mine]
        for use in uses:
            if use.mine and use.in_transaction and use.connection not in others:
                if use.writes:
                    raise WriterHeld(_HELD)
                if self.readers_block:
                    raise WriterHeld(_READING)

    def hold(self, connection: object, held: bool) -> None:
        """This thread's transaction on the driver's connection has the writer, written or not; or it is over."""
        for use in self._all():
            if use.connection is connection:
                use.held = held and use.mine

    def explain_lock(self) -> None:
        """After the database said "locked": raise :class:`WriterHeld` where this thread is in a transaction.

        A transaction begun with ``BEGIN IMMEDIATE`` holds the writer before it has written.
        """
        if any(use.mine and use.in_transaction for use in self._all()):
            raise WriterHeld(_PERHAPS)

    @contextmanager
    def own(self) -> Iterator[None]:
        """The use of the shared in-memory connection: nobody's pending work is on it, and all is as before after it."""
        self._await_others()
        idle = [use for use in self._all() if not use.writes]
        readers = [use for use in idle if use.in_transaction]
        self._mine.on = True
        try:
            yield
        finally:
            self._mine.on = False
            for use in readers:
                # The app began this transaction itself (the driver's classic mode would not have, for a
                # reader), and goes on as if it were in it.
                if use.connection.isolation_level is None and not use.in_transaction:
                    use.connection.execute("BEGIN")
            for use in idle:
                use.changes = _changes(use.connection)

    def _await_others(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            self.refuse_own()
            if not self._one_connection or not any(use.writes for use in self._all()):
                return
            if time.monotonic() > deadline:
                raise WriterHeld(_SHARED)
            time.sleep(_PAUSE)

    def _all(self) -> list[_Use]:
        return [use for uses in list(self._uses.values()) for use in list(uses)]

    def _returned(self, record: int) -> None:
        uses = self._uses.get(record, [])
        # A shared connection is in several uses at once: end one of this thread's, if it has one.
        mine = [use for use in uses if use.mine] or uses
        if mine:
            with suppress(ValueError):  # another thread was quicker
                uses.remove(mine[-1])
        if not uses:
            self._uses.pop(record, None)

    def _listen(self, engine: sa.Engine) -> None:
        # The engine may outlive this store: it must not keep it alive.
        this = weakref.ref(self)

        def checkout(connection: Any, record: Any, proxy: Any) -> None:
            watch = this()
            if watch is not None and not getattr(watch._mine, "on", False):
                use = _Use(get_ident(), working.get(), connection, _changes(connection))
                watch._uses.setdefault(id(record), []).append(use)

        def back(connection: Any, record: Any, *rest: Any) -> None:
            watch = this()
            if watch is not None and not getattr(watch._mine, "on", False):
                watch._returned(id(record))

        def ended(connection: sa.Connection) -> None:
            watch = this()
            if watch is not None and not (connection.closed or connection.invalidated):
                driver = connection.connection.dbapi_connection
                for use in watch._all():
                    if use.connection is driver:
                        use.changes = _changes(use.connection)

        sa.event.listen(engine, "checkout", checkout)
        sa.event.listen(engine, "checkin", back)
        sa.event.listen(engine, "detach", back)
        sa.event.listen(engine, "commit", ended)
        sa.event.listen(engine, "rollback", ended)
