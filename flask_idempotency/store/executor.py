"""Running one statement, or one message: on which connection, how often, and what its failures are called."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import sqlalchemy as sa

from ..errors import RowUnreadable, StoreError
from ..forking import notice
from . import failures
from .engine import in_memory, own_engine
from .message import Message, pooled, sends_messages
from .writer import WriterWatch

#: Under SERIALIZABLE a statement may be undone by each of its rivals in turn. With pauses that grow to
#: 20 ms this bounds the whole at well under a second.
_TRIES = 30
_PAUSE = 0.001
_LONGEST_PAUSE = 0.02

#: Jitter is the system's: an app's seeded `random` gives the same with and without the extension, and forked
#: workers do not draw alike.
_jitter = random.SystemRandom()


T = TypeVar("T")

_Values = Mapping[str, Any]
_Statement = sa.Executable | Message


class ValueRefused(StoreError):
    """The driver or the database refused a value; the cause says which and why."""

    def named(self, refused: type[StoreError]) -> StoreError:
        """The error to raise for it, of that kind."""
        return refused(f"The database can't hold a value. ({failures.cause(self.__cause__ or self)})")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a statement, or a message, came to. ``repeated``: its first reply was lost, so it may have run twice."""

    rows: Sequence[sa.Row[Any]]
    count: int
    inserted: sa.Row[Any] | None = None
    repeated: bool = False


class Executor:
    """Runs statements of one table on connections apart from the app's, each in a transaction of its own.

    :ivar reserved: runs the renewals. Where there is more than one connection, one is kept for them alone: they must
        not wait for requests that wait for a row which somebody has locked.
    """

    def __init__(
        self, engine: sa.Engine, table: sa.Table, pool_size: int, autocommit: bool, watch: WriterWatch | None = None
    ) -> None:
        self._app = engine
        self._table = table
        self.dialect_name = engine.dialect.name
        self.deletes_returning = engine.dialect.delete_returning
        self.separate = not in_memory(engine)
        self._watch = watch or (WriterWatch(engine) if self.dialect_name == "sqlite" else None)
        #: In autocommit a statement is a transaction; connections that are the app's are not in it.
        self._commits = not (autocommit and self.separate)
        split = self.separate and pool_size > 1
        self._own = own_engine(engine, pool_size - split, autocommit)
        self.reserved = Executor(engine, table, 1, autocommit, self._watch) if split else self
        sa.event.listen(engine, "engine_disposed", _disposed(weakref.ref(self)))
        if self._watch is not None and self.separate:
            sa.event.listen(self._own, "connect", _journal_noted(self._watch))
        self._lock = threading.Lock()

    def read(self, statement: _Statement, values: _Values | None = None) -> Outcome:
        """Run a statement that only reads."""
        return self._persist(statement, values or {}, StoreError)

    def write(self, statement: _Statement, values: _Values, refused: type[StoreError] = StoreError) -> Outcome:
        """Run a statement that writes.

        :param refused: what to raise where the database can't hold one of the values.
        :raises WriterHeld: the app's own uncommitted writes, in this thread, hold SQLite's only writer.
        """
        return self._persist(statement, values, refused, writes=True)

    def looked(self, look: Callable[[sa.Connection], T]) -> T:
        """What ``look`` finds on a connection of one's own: in the catalogue, by an inspector. It writes nothing.

        :raises StoreError: the database can't answer.
        """
        notice()
        try:
            with self.beside():
                if not self.separate:
                    self._own.pool = self._app.pool  # dispose() has given the app's engine another one
                with self._own.connect() as connection:
                    return look(connection)
        except StoreError:
            raise
        except Exception as error:
            raise self._explained(error) from error

    def refuse_own(self) -> None:
        """Raise :class:`WriterHeld` where this thread's own transaction keeps SQLite's writer from itself."""
        if self._watch is not None:
            self._watch.refuse_own()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """While the app's own transaction is begun: on a shared connection nothing of anybody's is under way."""
        self.refuse_own()
        if self._watch is None or self.separate:
            yield
        else:
            with self._lock, self._watch.own():
                yield

    def hold(self, connection: object, held: bool) -> None:
        """The app's transaction on this driver's connection holds SQLite's writer, written or not; or does no more."""
        if self._watch is not None:
            self._watch.hold(connection, held)

    @property
    def sends_messages(self) -> bool:
        """Whether several statements can go out as one :class:`~flask_idempotency.store.message.Message`."""
        return sends_messages(self._own)

    @property
    def schema(self) -> str | None:
        """The schema that the table is in on these connections; ``None``: the connections' own."""
        translated: Mapping[str | None, str | None] = self._own.get_execution_options().get("schema_translate_map", {})
        return translated.get(self._table.schema, self._table.schema)

    def close(self) -> None:
        """Close the connections of one's own; the next statement opens new ones."""
        if self.separate:
            self._own.dispose()
        if self.reserved is not self:
            self.reserved.close()

    def _persist(
        self, statement: _Statement, values: _Values, refused: type[StoreError], writes: bool = False
    ) -> Outcome:
        notice()
        repeated = reconnected = False
        for attempt in range(_TRIES):
            try:
                outcome = self._run(statement, values, writes)
                return replace(outcome, repeated=True) if repeated else outcome
            except ValueRefused as error:
                raise error.named(refused) from error.__cause__
            except StoreError:
                raise
            except Exception as error:
                # Exception, not SQLAlchemyError alone: an app's own listener that fetches a password for a
                # new connection may raise anything, and the store has no answer then either.
                if failures.is_lost(error) and not repeated:
                    # The statement may have been carried out, its reply alone lost. Repeating it is safe, since
                    # each names the fencing token that it writes or needs: a claim finds itself, a second
                    # recording changes nothing. Once only: a database that is down must not cost two waits more.
                    repeated = True
                elif failures.is_read_only(error) and not reconnected:
                    # A server that has become a replica keeps its connections; a new one may lead to its successor.
                    self._own.dispose()
                    reconnected = True
                elif failures.is_conflict(error) and attempt < _TRIES - 1:
                    time.sleep(_jitter.uniform(0, min(_PAUSE * 2**attempt, _LONGEST_PAUSE)))
                else:
                    raise self._explained(error) from error
        raise AssertionError("the last try returns or raises")

    def _run(self, statement: _Statement, values: _Values, writes: bool) -> Outcome:
        if self._watch is None or self.separate:
            return self._execute(statement, values, writes)
        # One connection for everybody: one statement at a time, and none over the app's pending work. Whoever is
        # next in line may be waiting for this thread's.
        self._watch.refuse_own()
        with self._lock, self._watch.own():
            # dispose() has given the app's engine another pool.
            self._own.pool = self._app.pool
            return self._execute(statement, values, writes)

    def _execute(self, statement: _Statement, values: _Values, writes: bool) -> Outcome:
        if isinstance(statement, Message):
            with pooled(self._own) as driver:
                return _sent(lambda: statement.pass_on(self._own.dialect, driver, values))
        with self._own.connect() as connection:
            if writes and self._watch is not None:
                self._watch.refuse_own()
            outcome = carried_out(connection, statement, values)
            if writes and self._commits:
                connection.commit()
            return outcome

    def _explained(self, error: Exception) -> StoreError:
        if self._watch is not None and failures.is_locked(error):
            self._watch.explain_lock()
        if failures.is_unreadable(error):
            return RowUnreadable(f"A stored row can't be read. ({failures.cause(error)})")
        return failures.store_error(error, self._table, self._own)


def carried_out(connection: sa.Connection, statement: _Statement, values: _Values) -> Outcome:
    """Carry a statement out, and fetch all that it returns.

    :raises ValueRefused: the database can't hold one of the values.
    """
    if isinstance(statement, Message):
        return _sent(lambda: statement.send(connection, values))
    with _telling_values():
        result = connection.execute(statement, values)
    # SQLAlchemy may let an insert return its key by itself. What was asked for with returning() is among the rows.
    own = result.is_insert and not (isinstance(statement, sa.Insert) and statement.returning_column_descriptions)
    rows = _fetched(result) if result.returns_rows else ()
    inserted = result.inserted_primary_key if own and result.rowcount == 1 else None
    return Outcome(rows, result.rowcount, inserted)


def _sent(send: Callable[[], tuple[Sequence[Any], int]]) -> Outcome:
    with _telling_values():
        return Outcome(*send())


@contextmanager
def _telling_values() -> Iterator[None]:
    """Tell refused values apart where it is certain that no listener for new connections raised the error."""
    try:
        yield
    except Exception as error:
        if failures.is_value(error):
            raise ValueRefused from error
        raise


def _disposed(executor: weakref.ref[Executor]) -> Callable[[sa.Engine], None]:
    def disposed(engine: sa.Engine) -> None:
        """Whoever closes the app's connections, to drop the database perhaps, means these too."""
        this = executor()
        if this is not None:
            this.close()

    return disposed


def _journal_noted(watch: WriterWatch) -> Callable[[Any, Any], None]:
    def connected(connection: Any, record: Any) -> None:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        watch.readers_block = mode != "wal"

    return connected


def _fetched(result: sa.CursorResult[Any]) -> Sequence[sa.Row[Any]]:
    try:
        return result.all()
    except (ValueError, TypeError, OverflowError) as error:
        # The types' own conversions: JSON that is none, a time that is none.
        raise RowUnreadable(f"A stored row can't be read. ({failures.cause(error)})") from error
