"""Statements of PostgreSQL's in the driver's own words: compiled once, several in one message, sent by its cursor.

What SQLAlchemy does around a statement, for the sake of any statement, takes several times what the driver does.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.sql.compiler import SQLCompiler

from ..errors import RowUnreadable

#: Drivers that send a text of several statements as one message, and give the last one's result.
_DRIVERS = ("psycopg2", "psycopg")

#: As many characters have the names of columns and parameters at most.
_LONGEST = 30


class Message:
    """Statements that go out together. Under READ COMMITTED each has a snapshot of its own, as if sent one by one.

    Outside of a transaction they are one: what the first ones wrote stays if all of them succeed.
    """

    def __init__(self, *statements: sa.ClauseElement) -> None:
        self._statements = statements
        self._text = ""
        self._given: dict[str, Any] = {}
        self._processors: dict[str, Callable[[Any], Any]] = {}
        self._row: Callable[..., Any] | None = None

    def send(self, connection: sa.Connection, values: Mapping[str, Any]) -> tuple[list[Any], int]:
        """Send them on a connection of SQLAlchemy's; see :meth:`pass_on`."""
        try:
            return self.pass_on(connection.dialect, connection.connection.dbapi_connection, values)
        except exc.DBAPIError as error:
            if error.connection_invalidated:
                # SQLAlchemy is to see it, too: it drops the connection, and makes the pool look at the others.
                with suppress(exc.DBAPIError):
                    connection.exec_driver_sql("SELECT 1")
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                connection.invalidate(error)  # the reply may be on its way still, to whoever comes next
            raise

    def pass_on(self, dialect: sa.Dialect, driver: Any, values: Mapping[str, Any]) -> tuple[list[Any], int]:
        """Pass them to the driver; returns the last one's rows, by the names of its columns, and how many it wrote.

        :raises sqlalchemy.exc.DBAPIError: as if SQLAlchemy had sent them.
        :raises RowUnreadable: the driver can't make values of what is stored.
        """
        if not self._text:
            self._compile(dialect)
        given = {name: values.get(name, given) for name, given in self._given.items()}
        for name, process in self._processors.items():
            given[name] = process(given[name])
        cursor = _cursor(dialect, driver)
        try:
            cursor.execute(self._text, given)
            while dialect.driver == "psycopg" and cursor.nextset():
                pass  # it stands at the first one's result, where psycopg2 has the last one's alone
            return self._fetched(cursor), cursor.rowcount
        except dialect.loaded_dbapi.Error as error:
            raise _wrapped(error, dialect, driver, cursor) from error
        finally:
            with suppress(Exception):  # of a connection that is lost
                cursor.close()

    def _compile(self, dialect: sa.Dialect) -> None:
        """Once, since all connections are of one engine. Two threads that meet here do the same."""
        texts = []
        for statement in self._statements:
            compiled = statement.compile(dialect=dialect)
            assert isinstance(compiled, SQLCompiler)
            texts.append(str(compiled))
            for bind, name in compiled.bind_names.items():
                assert self._given.setdefault(name, bind.value) == bind.value, name  # else two values with one name
                process = bind.type.dialect_impl(dialect).bind_processor(dialect)
                if process is not None:
                    self._processors[name] = process
        self._text = ";\n".join(texts)

    def _fetched(self, cursor: Any) -> list[Any]:
        if cursor.description is None:
            return []
        if self._row is None:
            self._row = _row_of(cursor.description)
        try:
            return [self._row(*row) for row in cursor.fetchall()]
        except (ValueError, TypeError, OverflowError) as error:
            raise RowUnreadable(f"A stored row can't be read. ({type(error).__name__}: {error})") from error


def sends_messages(engine: sa.Engine | sa.Connection) -> bool:
    """Whether :class:`Message` can be used there."""
    dialect = engine.dialect
    return (
        dialect.name == "postgresql"
        and dialect.driver in _DRIVERS
        and (dialect.driver == "psycopg2" or hasattr(dialect.dbapi, "ClientCursor"))
        # Values are given by their names, and columns come back by theirs, which SQLAlchemy was not told to shorten.
        and dialect.paramstyle == "pyformat"
        and min(dialect.label_length or _LONGEST, dialect.max_identifier_length) >= _LONGEST
        # Which schemas are meant is known to SQLAlchemy alone.
        and not engine.get_execution_options().get("schema_translate_map")
    )


def _cursor(dialect: sa.Dialect, driver: Any) -> Any:
    if dialect.driver != "psycopg":
        return driver.cursor()
    # Puts the values into the text, as psycopg2 does: PostgreSQL takes values for one statement only.
    return dialect.loaded_dbapi.ClientCursor(driver)


@contextmanager
def pooled(engine: sa.Engine) -> Iterator[Any]:
    """A driver's connection of the engine's pool, to pass a message to. One of SQLAlchemy's takes as long as that.

    :raises sqlalchemy.exc.DBAPIError: there is none to be had.
    """
    try:
        taken = engine.raw_connection()
    except engine.dialect.loaded_dbapi.Error as error:
        raise _wrapped(error, engine.dialect, None, None) from error
    try:
        yield taken.dbapi_connection
    except BaseException as error:
        lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
        if lost or not isinstance(error, Exception):
            # A worker's time-out, a greenlet killed: the reply may be on its way still, to whoever comes next.
            taken.invalidate(error)
        if lost:
            engine.dispose()  # the pool's others are as old
        raise
    finally:
        taken.close()


def _row_of(description: Any) -> Callable[..., Any]:
    return namedtuple("Row", [column[0] for column in description])


def _wrapped(error: Exception, dialect: sa.Dialect, driver: Any, cursor: Any) -> exc.DBAPIError:
    """The driver's error as SQLAlchemy would raise it, without the statement and its values."""
    wrapped = exc.DBAPIError.instance(
        None,
        None,
        error,
        dialect.loaded_dbapi.Error,
        hide_parameters=True,
        connection_invalidated=dialect.is_disconnect(error, driver, cursor),  # type: ignore[arg-type]
        dialect=dialect,
    )
    assert isinstance(wrapped, exc.DBAPIError)
    return wrapped
