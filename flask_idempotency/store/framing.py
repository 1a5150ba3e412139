"""Atomic mode's frame on PostgreSQL: BEGIN, SAVEPOINT, RELEASE and COMMIT ride in messages that are sent anyway.

Drivers send each of them as a message of its own, whose round trip costs more than the statement. So the driver is in
its autocommit mode for one operation's length. Whatever ends that calls :meth:`Frame.end`, the pool at the latest.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import chain
from typing import Any, cast

import sqlalchemy as sa

from .message import sends_messages

#: In a connection's `info`: its Frame.
_FRAME = "flask_idempotency_frame"
#: The modules whose listeners are the extension's own.
_OWN = __name__.partition(".")[0] + "."
#: SQLAlchemy's own name for the first savepoint of a connection. If it should choose another, that one is sent.
FIRST = "sa_savepoint_1"
#: libpq's states of a connection, as psycopg2 and psycopg 3 number them: without a transaction, in one, and in one in
#: which a statement has failed.
IDLE, IN_TRANSACTION, IN_ERROR = 0, 2, 3


class Frame:
    """One operation's: what of its frame is at the server already, and what is still to be said there.

    :ivar begun: whether a message has begun the transaction.
    :ivar ready: the savepoint that came with that message, until it is used.
    :ivar by_driver: the driver was made to know of the transaction, and sends what ends it.
    """

    def __init__(self, driver: Any, info: MutableMapping[Any, Any]) -> None:
        self.begun = False
        self.ready: str | None = None
        self.by_driver = False
        self._driver = driver
        self._info = info
        #: What SQLAlchemy has released and the server has not: said with the next savepoint, or never, by the COMMIT.
        self._released: str | None = None
        info[_FRAME] = self
        driver.autocommit = True

    def opened(self, ready: str | None) -> None:
        """A message has begun the transaction, and set that savepoint as the last thing that is not a look."""
        self.begun, self.ready = True, ready

    def withdraw(self) -> None:
        """Leave the savepoint that came with the first message unused: what follows must outlive the view's rollbacks.

        The view's first one, of the same name, hides it then.
        """
        self.ready = None

    def savepoint(self, connection: sa.Connection, name: str) -> None:
        """SQLAlchemy begins a savepoint."""
        if name == self.ready:
            self.ready = None
            return
        released, self._released = self._released, None
        _send(connection, *([f"RELEASE SAVEPOINT {released}"] if released else []), f"SAVEPOINT {name}")

    def release(self, name: str) -> None:
        """SQLAlchemy releases a savepoint, and with it those within it."""
        self._released = name

    def roll_back_to(self, connection: sa.Connection, name: str) -> None:
        """SQLAlchemy returns to a savepoint; those within it are gone, released or not."""
        self._released = None
        _send(connection, f"ROLLBACK TO SAVEPOINT {name}")

    def hand_over(self) -> None:
        """Let the driver know of the transaction. It begins it once more, of which PostgreSQL warns.

        It can't where a statement has failed: its BEGIN would fail too, and it would know of no transaction to end.
        Nor would it if what it is asked for next failed before its BEGIN: so it sends that at once.
        """
        if self._driver.info.transaction_status == IN_TRANSACTION:
            self._driver.autocommit = False
            self._driver.cursor().execute("SELECT 1")
            self.by_driver = True

    def end(self) -> None:
        """Leave no transaction, and the driver as it was. May be called again."""
        self._info.pop(_FRAME, None)
        if not self.by_driver:
            if self._driver.info.transaction_status != IDLE:
                self._driver.cursor().execute("ROLLBACK")
            self._driver.autocommit = False
            self.by_driver = True


def begin(connection: sa.Connection) -> Frame | None:
    """A frame for the transaction that is about to begin on a connection of :func:`framed`; ``None``: without one."""
    driver: Any = connection.connection.dbapi_connection
    if not isinstance(connection.dialect, _Framed) or not _plain(driver) or _others_listen(connection.engine):
        return None
    return Frame(driver, connection.info)


def framed(engine: sa.Engine) -> sa.Engine:
    """The same engine and pool, with connections that can have a frame; itself where the driver can't send messages."""
    if not sends_messages(engine):
        return engine
    with engine.connect():
        pass  # from now on its dialect knows its server, and so does a copy of it
    other = engine.execution_options()
    other.dialect = _framed_dialect(engine.dialect)
    sa.event.listen(other, "before_cursor_execute", _let_the_driver_know)
    sa.event.listen(engine, "reset", _ended_by_the_pool)
    return other


class _Framed:
    """A dialect whose savepoints go by the connection's frame, where it has one."""

    def do_savepoint(self, connection: sa.Connection, name: str) -> None:
        frame = _frame_of(connection)
        super().do_savepoint(connection, name) if frame is None else frame.savepoint(connection, name)  # type: ignore[misc]

    def do_release_savepoint(self, connection: sa.Connection, name: str) -> None:
        frame = _frame_of(connection)
        super().do_release_savepoint(connection, name) if frame is None else frame.release(name)  # type: ignore[misc]

    def do_rollback_to_savepoint(self, connection: sa.Connection, name: str) -> None:
        frame = _frame_of(connection)
        if frame is None:
            super().do_rollback_to_savepoint(connection, name)  # type: ignore[misc]
        else:
            frame.roll_back_to(connection, name)


def _framed_dialect(dialect: sa.Dialect) -> sa.Dialect:
    # SQLAlchemy looks for this one in the class itself.
    cached = {"supports_statement_cache": dialect.supports_statement_cache}
    kind = type("Framed", (_Framed, type(dialect)), cached)
    other: Any = object.__new__(kind)
    vars(other).update(vars(dialect))
    return cast(sa.Dialect, other)


def _frame_of(connection: sa.Connection) -> Frame | None:
    frame: Frame | None = connection.info.get(_FRAME)
    return None if frame is None or frame.by_driver else frame


def _send(connection: sa.Connection, *texts: str) -> None:
    connection.exec_driver_sql("; ".join(texts))


def _plain(driver: Any) -> bool:
    """Whether a bare BEGIN is what the driver would send: it has been told of no isolation level, nor the like.

    Nor has it begun: what an app's listener sends to a new connection, or to one that is checked out, begins.
    """
    read_only = getattr(driver, "read_only", getattr(driver, "readonly", None))
    told = (driver.isolation_level, read_only, driver.deferrable) != (None, None, None)
    return not driver.autocommit and not told and driver.info.transaction_status == IDLE


def _others_listen(engine: sa.Engine) -> bool:
    """Whether the app has listeners that count on BEGIN or SAVEPOINT coming right after them, or COMMIT."""
    events = engine.dispatch
    return not all(
        getattr(one, "__module__", "").startswith(_OWN) for one in chain(events.begin, events.savepoint, events.commit)
    )


def _let_the_driver_know(connection: sa.Connection, cursor: Any, *_: Any) -> None:
    """psycopg2 makes no cursor at the server (``yield_per``) for a transaction that it did not begin."""
    if connection.dialect.driver == "psycopg2" and cursor.name is not None:
        frame = _frame_of(connection)
        if frame is not None:
            frame.hand_over()


def _ended_by_the_pool(driver: Any, record: Any, state: sa.PoolResetState) -> None:
    """Whoever had the connection is gone without a word: the pool's own rollback would not be sent in autocommit."""
    frame: Frame | None = None if record is None else record.info.get(_FRAME)
    if frame is not None:
        frame.end()
