"""The extension's own connections: a small pool with the app's engine settings, apart from the app's pool."""

from __future__ import annotations

import weakref
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, Pool, QueuePool, SingletonThreadPool, StaticPool

from ..forking import in_child

#: SQLAlchemy's own default, for an app whose pool never makes anybody wait.
_POOL_TIMEOUT = 30.0

#: Among an engine's options, and in the `info` of its driver's connections: what is done there is no work of the app's.
_OWN = "flask_idempotency_own"

_engines: weakref.WeakSet[sa.Engine] = weakref.WeakSet()
#: Pools that a fork copied into this process. Collected as garbage, their connections would be closed,
#: and some drivers say good-bye to the server over the parent's socket.
_inherited: list[Pool] = []


def in_memory(engine: sa.Engine) -> bool:
    """Whether the database lives in the app's own connections (SQLite in memory), so that none can be apart."""
    if engine.dialect.name != "sqlite":
        return False
    database = engine.url.database or ""
    return (
        isinstance(engine.pool, (StaticPool, SingletonThreadPool))
        or database in ("", ":memory:")
        or database.startswith("file::memory:")
        or "mode=memory" in database
        or engine.url.query.get("mode") == "memory"
    )


def own_engine(engine: sa.Engine, pool_size: int, autocommit: bool) -> sa.Engine:
    """An engine with connections of its own, made as ``engine`` makes its own. Opens none by itself.

    In the driver's autocommit mode a statement is a transaction, and one round trip.
    """
    if in_memory(engine):
        # The app's pool without the listeners on the app's engine: some apps begin transactions in them.
        return sa.Engine(engine.pool, engine.dialect, engine.url, **_settings(engine))

    mysql = engine.dialect.name in ("mysql", "mariadb")

    def connect() -> DBAPIConnection:
        # A fresh pool object with the app's creator and pool listeners (a PRAGMA, a SET, a token for a
        # password); the one connection that it makes is then taken from it.
        proxy = engine.pool.recreate().connect()
        proxy.detach()
        connection = proxy.dbapi_connection
        assert connection is not None
        # A listener's SET that was left in a transaction stays, and autocommit can be switched on.
        (_end_transaction if mysql else _commit)(connection)
        if autocommit and engine.dialect.name == "sqlite":
            _leave_newer_mode(connection)
        if hasattr(connection, "prepare_threshold"):
            # psycopg prepares what it sees often. A transaction-pooling proxy would run the next
            # statement on another server connection, which knows of no such preparation.
            connection.prepare_threshold = None
        return connection

    settings = _settings(engine)
    if autocommit:
        settings["isolation_level"] = "AUTOCOMMIT"
    # A pool's settings can't be read in public ways; what isn't there has SQLAlchemy's default.
    pool = QueuePool(
        connect,
        pool_size=pool_size,
        max_overflow=0,
        timeout=getattr(engine.pool, "_timeout", _POOL_TIMEOUT),
        recycle=getattr(engine.pool, "_recycle", -1),
    )
    own = sa.create_engine(engine.url, pool=pool, **settings)
    if autocommit and mysql:
        # Other drivers send nothing where there is no transaction; these do, a round trip each time. The dialect is
        # this engine's own.
        own.dialect.do_commit = own.dialect.do_rollback = _nothing_to_send  # type: ignore[assignment,method-assign]
    sa.event.listen(own, "connect", _marked)
    _engines.add(own)
    return own


def _marked(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
    record.info[_OWN] = True


def _commit(connection: DBAPIConnection) -> None:
    connection.commit()


def _end_transaction(connection: DBAPIConnection) -> None:
    """Commit so that no transaction follows, and the connection stays, whatever ``completion_type`` says.

    With ``CHAIN`` a commit begins the next transaction, also in autocommit, and nothing would end that one.
    """
    cursor = connection.cursor()
    cursor.execute("COMMIT AND NO CHAIN NO RELEASE")
    cursor.close()


def _leave_newer_mode(connection: Any) -> None:
    """Under Python 3.12's ``autocommit=False`` a transaction is always open, whatever the isolation level is."""
    if getattr(connection, "autocommit", None) is False:
        connection.autocommit = True


def _nothing_to_send(connection: object) -> None:
    """In autocommit each statement was a transaction."""


def _settings(engine: sa.Engine) -> dict[str, Any]:
    options = engine.get_execution_options()
    kept = {name: options[name] for name in ("schema_translate_map",) if name in options}  # where the tables are
    return {
        # What is written here is no work of the app's: the mark tells changes.py so.
        "execution_options": {**kept, _OWN: True},
        "echo": engine.echo,
        # Recorded answers have no place in a log, nor in the text of an exception.
        "hide_parameters": True,
    }


def _forget_connections() -> None:
    """In a forked child: the connections belong to the parent. They are neither used nor closed here."""
    for engine in list(_engines):
        _inherited.append(engine.pool)
        engine.dispose(close=False)


in_child(_forget_connections)
