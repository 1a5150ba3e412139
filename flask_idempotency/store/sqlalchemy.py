"""Keys in a table of the app's own database, through SQLAlchemy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.base import PGDialect

from ..claim import Asking, Claim, Stored
from ..errors import ConfigurationError
from ..recorded import Recorded
from .atomic import Atomic, AtomicSQLite
from .atomic_postgresql import AtomicPostgreSQL
from .backend import Backend
from .base import Deleted
from .checking import check
from .executor import Executor
from .framing import framed
from .inside import Inside
from .inside_postgresql import InsidePostgreSQL
from .inside_sqlite import InsideSQLite
from .mysql import MySQLBackend
from .portable import PortableBackend
from .postgresql import PostgreSQLBackend
from .sqlite import SQLiteBackend
from .survey import Counted, Detail, Filters, Finding, Kept, Stats, Summary, Tally
from .table import build_table


class SQLAlchemyStore:
    """Keeps keys in a table of ``metadata``, on connections apart from those of the app.

    Nothing of the app's session is used: no statement of this store is part of the app's transactions,
    and none of the app's work is flushed, committed or rolled back.

    :param engine: the app's engine, or a function that returns it, called at the first use.
    :param metadata: the app's metadata; the table becomes part of it.
    :param table_name: the table's name.
    :param pool_size: how many connections of its own the store opens at most.
    """

    def __init__(
        self,
        engine: sa.Engine | Callable[[], sa.Engine],
        metadata: sa.MetaData,
        *,
        table_name: str = "idempotency_keys",
        pool_size: int = 5,
        _portable: bool = False,
    ) -> None:
        self.table = build_table(metadata, table_name)
        self._engine = engine
        self._pool_size = pool_size
        self._portable = _portable
        self._backend: Backend | None = None
        self._atomic: Atomic | None = None
        self._framed: sa.Engine | None = None
        self._preparing = threading.Lock()

    def prepare(self) -> None:
        """Find the engine, and watch it where its database has one writer. Opens no connection.

        Best called before the app has checked out a connection for a request; otherwise the first use
        does it.
        """
        self._ready()

    @property
    def engine(self) -> sa.Engine:
        """The app's engine, in whose database the table is."""
        self._ready()
        assert isinstance(self._engine, sa.Engine)
        return self._engine

    @property
    def separate(self) -> bool:
        """False for SQLite in memory, which has no connections but the app's own."""
        return self._ready().run.separate

    @property
    def supports_atomic(self) -> bool:
        """Whether :meth:`inside` is available: on PostgreSQL and SQLite."""
        return _supports_atomic(self._ready())

    def connect(self) -> sa.Connection:
        """A connection of the app's own pool, for :meth:`inside`."""
        if self._framed is None:
            self._framed = framed(self.engine)
        return self._framed.connect()

    def inside(self, connection: sa.Connection) -> Inside:
        """One operation within one transaction of ``connection``, which is fresh from :meth:`connect` (atomic mode).

        :raises ConfigurationError: the database is neither PostgreSQL nor SQLite.
        """
        if self._atomic is None:
            self._atomic = _atomic_backend(self._ready())
        return _inside(connection, self._atomic)

    def claim(self, asking: Asking) -> Claim | Stored:
        """Take a key that is not there, or return what is."""
        return self._ready().claim(asking)

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored``, unless somebody else was first or it is not to be taken."""
        return self._ready().take(asking, stored)

    def record(self, claim: Claim, recorded: Recorded, retention: float) -> bool:
        """Store the answer; False: the claim was lost.

        :raises RecordRefused: the database can't hold this answer.
        """
        return self._ready().record(claim, recorded, retention)

    def release(self, claim: Claim) -> bool:
        """Give the claim up; False: it was lost."""
        return self._ready().release(claim)

    def hold(self, claim: Claim) -> bool:
        """Leave the key to a person; False: the claim was lost."""
        return self._ready().hold(claim)

    def resume(self, claim: Claim) -> Mapping[str, str] | None:
        """The results of steps so far, and a sign of life; ``None``: the claim was lost.

        :raises RowUnreadable: what is stored is corrupt.
        """
        return self._ready().resume(claim)

    def keep_steps(self, claim: Claim, steps: Mapping[str, str]) -> bool:
        """Store the results of all steps so far, and a sign of life; False: the claim was lost.

        :raises RecordRefused: the database can't hold them.
        """
        return self._ready().keep_steps(claim, steps)

    def note_secret(self, claim: Claim, secret_id: str) -> str | None:
        """Note the secret's id, unless one is noted; returns the one that is; ``None``: the claim was lost."""
        return self._ready().note_secret(claim, secret_id)

    def renew(self, claims: Sequence[Claim]) -> set[str]:
        """A sign of life for all of them; returns the tokens that still hold."""
        return self._ready().renew(claims)

    def find(self, scope: str, key: str) -> Stored | None:
        """What is stored under a key."""
        return self._ready().find(scope, key)

    def settle(self, stored: Stored, recorded: Recorded, retention: float, token: str, force: bool = False) -> bool:
        """Record an answer over ``stored``, unless it has changed or is alive; with ``force`` also over a live claim.

        :raises RecordRefused: the database can't hold this answer.
        """
        return self._ready().settle(stored, recorded, retention, token, force)

    def free(self, stored: Stored, retention: float, token: str, force: bool = False) -> bool:
        """Make ``stored`` claimable, unless it has changed; alive or recorded, with ``force`` only."""
        return self._ready().free(stored, retention, token, force)

    def prunable(self) -> int:
        """How many keys are past their retention."""
        return self._ready().prunable()

    def prune(self, batch_size: int, bodies: bool = False) -> Deleted:
        """Delete at most ``batch_size`` keys that are past their retention; with ``bodies`` name those elsewhere."""
        return self._ready().prune(batch_size, bodies)

    def tokens_in_use(self) -> Iterator[str]:
        """The fencing tokens of all keys that may need a body elsewhere."""
        return self._ready().tokens_in_use()

    def stats(self) -> Stats:
        """The whole table at a glance."""
        return self._ready().stats()

    def tally(self, by: str) -> Iterator[Tally]:
        """The keys of each scope, or of each method and path; each may come several times, to be added up.

        :raises ValueError: ``by`` is neither ``scope`` nor ``path``.
        """
        return self._ready().tally(by)

    def listed(self, filters: Filters, limit: int, before: int | None = None) -> Sequence[Summary]:
        """At most ``limit`` keys, those stored last first; with ``before`` only those with a smaller id."""
        return self._ready().listed(filters, limit, before)

    def detail(self, scope: str, key: str) -> Detail | None:
        """All that is stored of one key.

        :raises RowUnreadable: the row is corrupt.
        """
        return self._ready().detail(scope, key)

    def erase(self, scope: str, batch_size: int, bodies: bool = False, key: str | None = None) -> Deleted:
        """Delete at most ``batch_size`` keys of a scope, or the one that is named, whatever their status."""
        return self._ready().erase(scope, batch_size, bodies, key)

    @property
    def older(self) -> bool:
        """Whether an overview has found the table without the columns of counts, which the migration adds."""
        return self._ready().older

    def count(self, counted: Sequence[Counted]) -> None:
        """Add to the counts of keys, in one statement for many. Of a key that is gone nothing is counted.

        :raises StoreError: also where the table has no columns for counts yet.
        """
        self._ready().count(counted)

    def kept(self, scope: str, limit: int) -> Kept:
        """How many keys of a scope are not new again yet, up to ``limit``, and when the first of them will be."""
        return self._ready().kept(scope, limit)

    def check(self) -> Sequence[Finding]:
        """What is wrong with the table: missing, of an older shape, inexact, indexes gone, clocks apart; what waits."""
        return check(self._ready())

    def refuse_own(self) -> None:
        """Raise :class:`~flask_idempotency.errors.WriterHeld` where the app's own work in this thread holds SQLite's
        one writer. Watches the app's connections from then on, at the latest.
        """
        self._ready().run.refuse_own()

    def close(self) -> None:
        """Close the store's own connections. The next call opens new ones."""
        if self._backend is not None:
            self._backend.run.close()

    def _ready(self) -> Backend:
        if self._backend is None:
            with self._preparing:
                if self._backend is None:
                    self._backend = self._choose()
        return self._backend

    def _choose(self) -> Backend:
        if not isinstance(self._engine, sa.Engine):
            self._engine = self._engine()
        engine = self._engine
        backend: type[PostgreSQLBackend | SQLiteBackend | MySQLBackend | PortableBackend] = PortableBackend
        if isinstance(engine.dialect, PGDialect) and not self._portable:
            backend = PostgreSQLBackend
        elif engine.dialect.name == "sqlite" and not self._portable:
            backend = SQLiteBackend
        elif engine.dialect.name in ("mysql", "mariadb") and not self._portable:
            backend = MySQLBackend
        return backend(self.table, Executor(engine, self.table, self._pool_size, backend.autocommit))


def _atomic_backend(backend: Backend) -> Atomic:
    """The statements of atomic mode beside those of ``backend``.

    :raises ConfigurationError: they are not known for its database.
    """
    if isinstance(backend, PostgreSQLBackend) and _supports_atomic(backend):
        return AtomicPostgreSQL(backend.table, backend.run)
    if isinstance(backend, SQLiteBackend):
        return AtomicSQLite(backend.table, backend.run)
    raise ConfigurationError(
        f"Atomic mode is available on PostgreSQL and SQLite, and not on {backend.run.dialect_name!r}. Leave "
        "IDEMPOTENCY_ATOMIC (atomic=True) out, or keep the keys in a database of one of these."
    )


def _supports_atomic(backend: Backend) -> bool:
    """Whether atomic mode knows this database. One that only speaks as PostgreSQL does may have other locks."""
    return isinstance(backend, SQLiteBackend) or (
        isinstance(backend, PostgreSQLBackend) and backend.run.dialect_name == "postgresql"
    )


def _inside(connection: sa.Connection, backend: Atomic) -> Inside:
    """An operation on that connection."""
    return (InsideSQLite if isinstance(backend, AtomicSQLite) else InsidePostgreSQL)(connection, backend)
