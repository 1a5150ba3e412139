"""Several statements of PostgreSQL's as one message: one round trip, and the last one's result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

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

    def send(self, connection: sa.Connection, values: Mapping[str, Any]) -> sa.CursorResult[Any]:
        """Send them in the driver's own spelling."""
        if not self._text:
            self._compile(connection.dialect)
        given = {name: values.get(name, given) for name, given in self._given.items()}
        for name, process in self._processors.items():
            given[name] = process(given[name])
        with _client_side(connection):
            return connection.exec_driver_sql(self._text, given)

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


@contextmanager
def _client_side(connection: sa.Connection) -> Iterator[None]:
    """Let psycopg 3 put the values into the text, as psycopg2 does: PostgreSQL takes values for one statement only."""
    if connection.dialect.driver != "psycopg":
        yield
        return
    driver: Any = connection.connection.dbapi_connection
    module: Any = connection.dialect.dbapi
    before = driver.cursor_factory
    driver.cursor_factory = _last_result(module)
    try:
        yield
    finally:
        driver.cursor_factory = before


@functools.cache
def _last_result(driver: Any) -> type[Any]:
    class LastResult(driver.ClientCursor):  # type: ignore[misc]
        """Stands at the last statement's result, not at the first one's."""

        def execute(self, *args: Any, **kwargs: Any) -> Any:
            super().execute(*args, **kwargs)
            while self.nextset():
                pass
            return self

    return LastResult
