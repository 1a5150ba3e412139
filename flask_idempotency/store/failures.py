"""What a database's error means: worth another try, about this very value, or for a person to mend."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import exc

from ..errors import CommitUnknown, StoreError, Undone

#: PostgreSQL's undefined table and column, and an ON CONFLICT that no unique index backs.
_SCHEMA_STATES = ("42P01", "42703", "42P10")
_SCHEMA_TEXTS = ("no such table", "no such column", "has no column named", "ON CONFLICT clause does not match")
#: Serialization failure and deadlock: nothing was done, and doing it again is what PostgreSQL asks for.
_CONFLICT_STATES = ("40001", "40P01")

_UNIQUE_STATE = "23505"

#: What speaks to MySQL and MariaDB, by the package that its errors come from. Others number their errors, too.
_MYSQL_DRIVERS = ("pymysql", "MySQLdb", "mariadb", "mysql", "aiomysql", "asyncmy")
#: MySQL's and MariaDB's error numbers: a duplicate in a unique index,
_DUPLICATE = (1062, 1586)
#: a deadlock; and MariaDB's innodb_snapshot_isolation, whose row has changed since it was read,
_CONFLICT_NUMBERS = (1213, 1020)
#: no such table, no such column,
_SCHEMA_NUMBERS = (1146, 1054)
#: a statement over max_allowed_packet,
_PACKET_NUMBER = 1153
#: such a one, a row or result too large, a number out of range, a text of another character set, a text too long, JSON
#: that is none (in MariaDB a constraint),
_VALUE_NUMBERS = (_PACKET_NUMBER, 1118, 1264, 1366, 1406, 3140, 4025)
#: a lock that was waited for in vain (by default for 50 s, so that no other try is made),
_WAIT_NUMBERS = (1205,)
#: a server that takes no writes, since it is started so, or is a replica. PostgreSQL's is a state.
_READ_ONLY = (1290, 1836, 1792, "25006")


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE of a driver's error (psycopg 3 and 2 spell it differently); empty where there is none."""
    original = getattr(error, "orig", None)
    return str(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or "")


def mysql_number(error: BaseException) -> int:
    """The number of an error of MySQL or MariaDB; 0 where it is of another database."""
    original = getattr(error, "orig", None)
    if type(original).__module__.partition(".")[0] not in _MYSQL_DRIVERS:
        return 0
    numbers = (getattr(original, "errno", None), *getattr(original, "args", ())[:1])
    return next((number for number in numbers if isinstance(number, int)), 0)


def is_lost(error: BaseException) -> bool:
    """Whether the connection broke: the statement may or may not have been carried out."""
    return isinstance(error, exc.DBAPIError) and error.connection_invalidated


def is_conflict(error: BaseException) -> bool:
    """Whether the database undid the statement because of a concurrent one."""
    return sqlstate(error) in _CONFLICT_STATES or mysql_number(error) in _CONFLICT_NUMBERS


def is_duplicate(error: BaseException) -> bool:
    """Whether MySQL's unique index refused a row: it is there already."""
    return mysql_number(error) in _DUPLICATE


def is_taken(error: BaseException, table: sa.Table) -> bool:
    """Whether PostgreSQL refused a row of that table because there is one with its key."""
    diagnosis = getattr(getattr(error, "orig", None), "diag", None)
    return sqlstate(error) == _UNIQUE_STATE and getattr(diagnosis, "table_name", None) == table.name


def is_too_large(error: BaseException) -> bool:
    """Whether MySQL says that a statement is over its ``max_allowed_packet``."""
    return mysql_number(error) == _PACKET_NUMBER


def is_read_only(error: BaseException) -> bool:
    """Whether the server takes no writes on this connection, or none any more."""
    return mysql_number(error) in _READ_ONLY or sqlstate(error) in _READ_ONLY


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
    if sqlstate(error)[:2] in ("22", "54") or mysql_number(error) in _VALUE_NUMBERS:
        return True
    # Drivers and SQLAlchemy raise these as they are, or wrapped, before anything is sent.
    inner = error.orig if isinstance(error, exc.StatementError) else error
    return isinstance(inner, (ValueError, TypeError, OverflowError))


def store_error(error: BaseException, table: sa.Table, engine: sa.Engine) -> StoreError:
    """The error to raise, with a message that says what to do."""
    if is_schema(error, table, engine):
        return lacks_schema(table, cause(error))
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
    if mysql_number(error) in _WAIT_NUMBERS:
        return StoreError(
            "A row of the table was locked by somebody else's transaction for longer than the database lets a "
            f"statement wait (innodb_lock_wait_timeout). ({cause(error)})"
        )
    if is_read_only(error):
        return StoreError(
            "The server takes no writes. Is it a replica, or has it become one? Let the URL lead to the primary. "
            f"({cause(error)})"
        )
    if is_conflict(error):
        return StoreError(f"The database kept undoing the statement because of concurrent ones. ({cause(error)})")
    return StoreError(f"The database that holds the idempotency keys could not answer. ({cause(error)})")


def lacks_schema(table: sa.Table, found: str) -> StoreError:
    """The error to raise where the table, or what it needs, is not there."""
    return StoreError(
        f"The table {table.fullname!r} is missing, or is not as this version needs it. Run the migration "
        f"(flask db migrate, then flask db upgrade), or db.create_all(). ({found})"
    )


def undone(error: BaseException) -> Undone:
    """The error to raise after the database has undone a transaction."""
    return Undone(f"The database undid the app's transaction because of a concurrent one. ({cause(error)})")


def of_commit(error: exc.DBAPIError) -> Exception:
    """The error to raise where a transaction of the app's was not committed on PostgreSQL, or may have been."""
    if is_conflict(error):
        return undone(error)
    if is_lost(error):
        return CommitUnknown(f"The connection was lost while the commit was under way. ({cause(error)})")
    return error


def is_schema(error: BaseException, table: sa.Table, engine: sa.Engine) -> bool:
    """Whether the table, a column of it, or its unique index is not there."""
    if not isinstance(error, (exc.ProgrammingError, exc.OperationalError)) or is_lost(error):
        return False
    if mysql_number(error) in _SCHEMA_NUMBERS or sqlstate(error) in _SCHEMA_STATES:
        return True
    if any(text in str(error.orig) for text in _SCHEMA_TEXTS):
        return True
    if engine.dialect.name in ("postgresql", "sqlite", "mysql", "mariadb"):
        return False
    try:
        there = {column["name"] for column in sa.inspect(engine).get_columns(table.name, schema=table.schema)}
    except exc.NoSuchTableError:
        return True
    except Exception:
        return False
    return not there.issuperset(table.c.keys())


def cause(error: BaseException) -> str:
    """The driver's own words, on one line, without the statement and its values."""
    original = getattr(error, "orig", None) or error
    # PostgreSQL's further lines quote the row, and with it the recorded answer.
    words = getattr(getattr(original, "diag", None), "message_primary", None) or original
    return " ".join(f"{type(original).__name__}: {words}".split())
