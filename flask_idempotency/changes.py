"""What a request commits to the app's databases, seen through SQLAlchemy's events.

A statement that writes leaves a mark on its connection. The end of the transaction looks at the mark: a commit hands
it to the :class:`Changes` of the request that commits, whichever wrote; a rollback forgets it. In doubt something
counts as committed, since a key that is held without need costs a look, and one that is released wrongly a second run.

Not seen: a ``SELECT`` that calls a function which writes; what a driver's own connection, taken from a SQLAlchemy
connection, is told directly; a driver's connection from ``engine.raw_connection()`` that is still out at the
request's end (one that has come back counts, whatever it did); and databases that are used without SQLAlchemy.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, ParamSpec, TypeAlias

import sqlalchemy as sa
from flask import has_request_context, request

from . import statements
from .statements import Part

P = ParamSpec("P")
Info: TypeAlias = MutableMapping[Any, Any]

#: Where a request's :class:`Changes` may stand in its WSGI environ: found by what runs in the request's context and
#: not in the one of :func:`noting`, as a thread with a copied request context.
ENVIRON: Final = "flask_idempotency.changes"

#: The execution option of the extension's own engine, and in the `info` of its driver's connections: what is sent there
#: is not the app's. store/engine.py sets it.
_OWN: Final = "flask_idempotency_own"

#: In a connection's `info` while the store frames its transaction by hand, and sees to its end; store/framing.py sets
#: it.
_FRAME: Final = "flask_idempotency_frame"

# Keys of a connection's `info`, which goes with the driver's connection: with one pool for all (StaticPool), what one
# SQLAlchemy connection writes another commits.
_WROTE: Final = "flask_idempotency_wrote"  # _Writes of the transaction
_COMMIT: Final = "flask_idempotency_commit"  # _Commit, the last one
_SET: Final = "flask_idempotency_set"  # a setting was made, which a rollback would undo
_RAW: Final = "flask_idempotency_raw"  # taken from the pool, and not by a SQLAlchemy connection

#: libpq's state of a connection without a transaction.
_IDLE: Final = 0

_logger: Final = logging.getLogger("flask_idempotency")


class _Writes:
    """The statements that wrote in one transaction: the first one's words, and how many there were."""

    def __init__(self, first: str) -> None:
        self.first = first
        self.count = 1


class Changes:
    """What one request committed to the app's databases since its claim. Threads may share it."""

    def __init__(self) -> None:
        self._committed: list[_Writes] = []

    @property
    def committed(self) -> bool:
        """Whether a write was committed, or may have been: the reply to its commit was lost."""
        return bool(self._committed)

    @property
    def seen(self) -> str:
        """What was committed, for a log: ``INSERT INTO charge (and 2 more)``. No values; empty if there was nothing."""
        committed = list(self._committed)
        if not committed:
            return ""
        more = sum(writes.count for writes in committed) - 1
        return f"{committed[0].first} (and {more} more)" if more else committed[0].first

    def _add(self, writes: _Writes) -> None:
        self._committed.append(writes)

    def _take_back(self, writes: _Writes) -> None:
        self._committed.remove(writes)


class _Commit(NamedTuple):
    """A commit that has been asked for, until the next transaction begins: it may yet fail."""

    connection: weakref.ref[sa.Connection]
    changes: Changes | None
    writes: _Writes


_current: ContextVar[Changes | None] = ContextVar("flask_idempotency_changes", default=None)


@contextmanager
def noting(changes: Changes | None) -> Iterator[None]:
    """Within the block, what this context commits belongs to ``changes``; with ``None``, to nobody in particular."""
    before = _current.get()
    _current.set(changes)
    try:
        yield
    finally:
        # Not by a token, which is refused where a block ends in another context than it began in.
        _current.set(before)


def watch() -> None:
    """Listen to all engines of the process, those made already and those to come. A second call changes nothing."""
    # There is no lock, which a fork could copy while it is held: where two threads meet, SQLAlchemy keeps one of two
    # listeners that are the same.
    for target, name, listener in _LISTENERS:
        if not sa.event.contains(target, name, listener):
            sa.event.listen(target, name, listener)


def wrote(connection: sa.Connection) -> bool:
    """Whether the connection's open transaction has written."""
    info = _info(connection)
    return info is not None and _WROTE in info


def has_settings(connection: sa.Connection) -> bool:
    """Whether the connection's open transaction has settings (``SET``, ``set_config()``), which a rollback undoes."""
    info = _info(connection)
    return info is not None and _SET in info


def _changes() -> Changes | None:
    changes = _current.get()
    if changes is None and has_request_context():
        changes = request.environ.get(ENVIRON)
    return changes


# Marks on connections


def _info(connection: sa.Connection) -> Info | None:
    # Asked of a connection that has been invalidated, `info` would open another.
    return None if connection.closed or connection.invalidated else connection.info


def _mark(info: Info, part: Part) -> None:
    writes: _Writes | None = info.get(_WROTE)
    if writes is None:
        info[_WROTE] = _Writes(part.words)
    else:
        writes.count += 1


def _count(info: Info) -> None:
    """The transaction's writes are committed for certain."""
    writes: _Writes | None = info.pop(_WROTE, None)
    changes = _changes() if writes is not None else None
    if writes is not None and changes is not None:
        changes._add(writes)


def _commits_at_once(connection: sa.Connection) -> bool:
    """Whether what has just been written is committed already: there is no transaction."""
    driver: Any = connection.connection.driver_connection
    within = getattr(driver, "in_transaction", None)
    if isinstance(within, bool):  # sqlite3: whatever the mode, and whoever began
        return not within
    # libpq's word, in psycopg2 and psycopg. psycopg2 begins nothing after a COMMIT that it was not asked for.
    if getattr(getattr(driver, "info", None), "transaction_status", None) == _IDLE:
        return True
    if getattr(driver, "autocommit", None) is True:
        # A transaction that the app began by hand may end where nobody sees it: in the driver's own hands, or after a
        # rollback that the driver did not send.
        return _FRAME not in connection.info
    asked = getattr(driver, "get_autocommit", None)
    if callable(asked):  # PyMySQL, mysqlclient: what the server said last
        return bool(asked())
    option = connection.get_execution_options().get("isolation_level")
    return (option or getattr(connection.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT"


def _commits_by_itself(connection: sa.Connection) -> bool:
    """Whether the database commits around many statements, such as those that change the schema, asked or not."""
    return connection.dialect.name in ("mysql", "mariadb", "oracle")


def _own(connection: sa.Connection) -> bool:
    return bool(connection.get_execution_options().get(_OWN))


# Listeners


def _quietly(listener: Callable[P, None]) -> Callable[P, None]:
    """What fails here is the extension's trouble and not the app's. What was not followed counts as committed."""

    @functools.wraps(listener)
    def listen(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            listener(*args, **kwargs)
        except Exception:
            with suppress(Exception):
                _logger.exception("A statement or commit of the app could not be followed.")
                changes = _changes()
                if changes is not None:
                    changes._add(_Writes("what could not be followed"))

    return listen


@_quietly
def _executed(connection: sa.Connection, cursor: Any, statement: str, *_: Any) -> None:
    if _own(connection):
        return
    parts = statements.parts(statement, _commits_by_itself(connection))
    info = _info(connection) if parts else None
    if info is None:
        return
    for part in parts:
        if part.effect == "write":
            _mark(info, part)
        elif part.effect == "commit":
            _count(info)
            info.pop(_SET, None)
        elif part.effect == "rollback":
            info.pop(_WROTE, None)
            info.pop(_SET, None)
        elif part.effect == "setting":
            info[_SET] = True
    # Also after a release: without a BEGIN, SQLite's outermost savepoint is the transaction.
    if _WROTE in info and _commits_at_once(connection):
        _count(info)


@_quietly
def _failed(context: sa.engine.ExceptionContext) -> None:
    connection = context.connection
    info = _info(connection) if connection is not None else None
    if connection is None or info is None:
        return
    # What is no error of the driver (a worker's time-out, a greenlet killed) came while the reply was awaited.
    lost = context.is_disconnect or context.sqlalchemy_exception is None
    commit: _Commit | None = info.get(_COMMIT)
    # Where connections share the driver's, another one's error says nothing about this one's commit.
    if commit is not None and commit.connection() is connection:
        del info[_COMMIT]
        if not lost:
            _refused(commit, connection, info)
    if context.statement is not None and not _own(connection):
        _statement_failed(context, connection, info, lost)


def _refused(commit: _Commit, connection: sa.Connection, info: Info) -> None:
    if commit.changes is not None:
        commit.changes._take_back(commit.writes)
    if getattr(connection.connection.driver_connection, "in_transaction", None) is True:
        info[_WROTE] = commit.writes  # SQLite, when it was busy: the transaction goes on


def _statement_failed(context: sa.engine.ExceptionContext, connection: sa.Connection, info: Info, lost: bool) -> None:
    parts = statements.parts(context.statement or "", _commits_by_itself(connection))
    many = context.execution_context is not None and context.execution_context.executemany
    partly = lost or many or len(parts) > 1 or any(part.piecemeal for part in parts)
    for part in parts:
        at_once = part.effect == "write" and _commits_at_once(connection)
        if part.effect == "write" and (partly or not at_once):
            _mark(info, part)
        if partly and (at_once or part.effect == "commit"):
            _count(info)


def _forget(connection: sa.Connection, *names: str) -> None:
    info = _info(connection)
    if info is not None:
        for name in names:
            info.pop(name, None)


@_quietly
def _beginning(connection: sa.Connection, *_: Any) -> None:
    _forget(connection, _COMMIT)  # it has succeeded


@_quietly
def _committing(connection: sa.Connection, *_: Any) -> None:
    info = _info(connection)
    if info is None:
        return
    info.pop(_COMMIT, None)
    info.pop(_RAW, None)
    info.pop(_SET, None)
    writes: _Writes | None = info.pop(_WROTE, None)
    if writes is not None:
        changes = _changes()
        if changes is not None:
            changes._add(writes)
        info[_COMMIT] = _Commit(weakref.ref(connection), changes, writes)


@_quietly
def _rolling_back(connection: sa.Connection, *_: Any) -> None:
    _forget(connection, _WROTE, _SET, _COMMIT, _RAW)


@_quietly
def _checked_out(driver_connection: Any, record: Any, *_: Any) -> None:
    if _OWN not in record.info:
        record.info[_RAW] = True  # until a SQLAlchemy connection says that it was the one


@_quietly
def _connected(connection: sa.Connection) -> None:
    _forget(connection, _RAW)


@_quietly
def _returned(driver_connection: Any, record: Any, state: sa.PoolResetState) -> None:
    if record is None:  # detached from the pool
        return
    info: Info = record.info
    info.pop(_COMMIT, None)
    info.pop(_SET, None)
    if not state.transaction_was_reset:
        info.pop(_WROTE, None)  # the pool rolls back; else a mark that is left is a transaction that is left
    if info.pop(_RAW, None):
        info[_WROTE] = _Writes("a connection of the driver")
        _count(info)


_LISTENERS: Final[tuple[tuple[Any, str, Callable[..., None]], ...]] = (
    (sa.Engine, "after_cursor_execute", _executed),
    (sa.Engine, "handle_error", _failed),
    (sa.Engine, "begin", _beginning),
    (sa.Engine, "begin_twophase", _beginning),
    (sa.Engine, "commit", _committing),
    (sa.Engine, "prepare_twophase", _committing),
    (sa.Engine, "commit_twophase", _committing),
    (sa.Engine, "rollback", _rolling_back),
    (sa.Engine, "rollback_twophase", _rolling_back),
    (sa.Engine, "engine_connect", _connected),
    (sa.Pool, "checkout", _checked_out),
    (sa.Pool, "reset", _returned),
)
