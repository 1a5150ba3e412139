"""What a database's error means: worth another try, about this very value, or for a person to mend."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import exc

from ..errors import StoreError, Undone

#: PostgreSQL's undefined table and column, and an ON CONFLICT that no unique index backs.
_SCHEMA_STATES = ("42P01", "42703", "42P10")
_SCHEMA_TEXTS = ("no such table", "no such column", "has no column named", "ON CONFLICT clause does not match")
#: Serialization failure and deadlock: nothing was done, and doing it again is what PostgreSQL asks for.
_CONFLICT_STATES = ("40001", "40P01")


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE of a driver's error (psycopg 3 and 2 spell it differently); empty where there is none."""
    original = getattr(error, "orig", None)
    return str(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or "")


def is_lost(error: BaseException) -> bool:
    """Whether the connection broke: the statement may or may not have been carried out."""
    return isinstance(error, exc.DBAPIError) and error.connection_invalidated


def is_conflict(error: BaseException) -> bool:
    """Whether the database undid the statement because of a concurrent one."""
    return sqlstate(error) in _CONFLICT_STATES


def is_locked(error: BaseException) -> bool:
    """Whether SQLite gave up waiting for its writer."""
    return isinstance(error, exc.OperationalError) and "is locked" in str(error.orig)


def is_unreadable(error: BaseException) -> bool:
    """Whether a stored value could not be turned into a Python one (SQLite's text that is not UTF-8)."""
    return isinstance(error, exc.OperationalError) and "Could not decode" in str(error.orig)


def is_value(error: BaseException) -> bool:
    """Whether a value is one that the database, or its driver, can't hold."""
    if isinstance(error, exc.DataError):
        return True
    # Class 22: data exceptions. Class 54: limits of the program, such as a value's size.
    if sqlstate(error)[:2] in ("22", "54"):
        return True
    # Drivers and SQLAlchemy raise these as they are, or wrapped, before anything is sent.
    inner = error.orig if isinstance(error, exc.StatementError) else error
    return isinstance(inner, (ValueError, TypeError, OverflowError))


def store_error(error: BaseException, table: sa.Table, engine: sa.Engine) -> StoreError:
    """The error to raise, with a message that says what to do."""
    if _lacks_schema(error, table, engine):
        return StoreError(
            f"The table {table.fullname!r} is missing, or is not as this version needs it. Run the migration "
            f"(flask db migrate, then flask db upgrade), or db.create_all(). ({cause(error)})"
        )
    if isinstance(error, exc.TimeoutError):
        return StoreError(
            "All connections of the extension's own pool were in use for too long. Either the database answers too "
            f"slowly, or more are needed (IDEMPOTENCY_POOL_SIZE). ({cause(error)})"
        )
    if is_locked(error):
        return StoreError(
            "SQLite's one writer was held by somebody else for longer than the busy timeout. Keep transactions short, "
            f'or raise the timeout (connect_args={{"timeout": …}}). ({cause(error)})'
        )
    if is_conflict(error):
        return StoreError(f"The database kept undoing the statement because of concurrent ones. ({cause(error)})")
    return StoreError(f"The database that holds the idempotency keys could not answer. ({cause(error)})")


def undone(error: BaseException) -> Undone:
    """The error to raise after the database has undone a transaction."""
    return Undone(f"The database undid the app's transaction because of a concurrent one. ({cause(error)})")


def _lacks_schema(error: BaseException, table: sa.Table, engine: sa.Engine) -> bool:
    if not isinstance(error, (exc.ProgrammingError, exc.OperationalError)) or is_lost(error):
        return False
    if sqlstate(error) in _SCHEMA_STATES or any(text in str(error.orig) for text in _SCHEMA_TEXTS):
        return True
    if engine.dialect.name in ("postgresql", "sqlite"):
        return False
    try:
        return not sa.inspect(engine).has_table(table.name, schema=table.schema)
    except Exception:
        return False


def cause(error: BaseException) -> str:
    """The driver's own words, on one line, without the statement and its values."""
    original = getattr(error, "orig", None) or error
    # PostgreSQL's further lines quote the row, and with it the recorded answer.
    words = getattr(getattr(original, "diag", None), "message_primary", None) or original
    return " ".join(f"{type(original).__name__}: {words}".split())
