"""What requests cost at the server: counted on the wire and in PostgreSQL's own statistics, never timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy

from .servers import tcp_url

#: Requests that open connections, and after which psycopg 3 has prepared what comes again and again.
_WARM_UP: Final = 15

_NAME: Final = "counted"
_TABLES: Final = """
    SELECT coalesce(sum(n_tup_ins + n_tup_upd), 0) FROM pg_stat_user_tables
"""
_FLUSHES: Final = """
    SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal' AND backend_type = 'client backend'
"""
_FRAMES: Final = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")


@dataclass(frozen=True)
class Cost:
    """What one request costs the server, on average.

    :ivar statements: those that read or write; ``BEGIN``, ``COMMIT`` and savepoints are not among them.
    :ivar messages: all of them, where each driver's message counts once, however many statements it holds.
    :ivar flushes: commits that wait for the log to reach the disk.
    :ivar wal_bytes: how much log was written.
    :ivar dead_tuples: versions of rows that nobody needs any more.
    """

    statements: float
    messages: float
    round_trips: float
    flushes: float
    wal_bytes: float
    dead_tuples: float


@contextmanager
def counted(server: Postgres) -> Iterator[CuttingProxy]:
    """A proxy on a TCP port in front of the server, for the app whose requests are counted.

    The app's URL is that of :func:`url`.
    """
    proxy = CuttingProxy(("127.0.0.1", server.port))
    try:
        yield proxy
    finally:
        proxy.stop()


def url(server: Postgres, database: str, driver: str, proxy: CuttingProxy) -> str:
    """SQLAlchemy's URL of a database through the proxy, by which the app's connections are known."""
    return f"{tcp_url(server, database, driver, proxy.port)}?application_name={_NAME}"


def cost(
    server: Postgres,
    database: str,
    proxy: CuttingProxy,
    send: Callable[[], object],
    close: Callable[[], None],
    requests: int = 50,
) -> Cost:
    """Count what a request costs, on average over some.

    :param send: makes one request of an app that reaches the database through the proxy.
    :param close: gives back all of its connections: a connection's statistics are complete when it has ended.
    """
    for _ in range(_WARM_UP):
        send()
    trips = proxy.round_trips
    with proxy.counting() as seen:
        for _ in range(requests):
            send()
    trips = proxy.round_trips - trips
    written = _written(server, database, send, close, requests)
    statements = [one for message in seen for one in message.split(";") if one.strip()]
    framed = sum(one.split()[0].upper() in _FRAMES for one in statements)
    return Cost(
        (len(statements) - framed) / requests, len(seen) / requests, trips / requests, *(w / requests for w in written)
    )


def _written(
    server: Postgres, database: str, send: Callable[[], object], close: Callable[[], None], requests: int
) -> tuple[float, float, float]:
    """Flushes, bytes of log, and dead tuples of so many requests."""
    _settle(server, database, close)
    before, start = _statistics(server, database), _position(server)
    for _ in range(requests):
        send()
    end = _position(server)
    _settle(server, database, close)
    after = _statistics(server, database)
    flushes, versions, rows = (late - early for late, early in zip(after, before, strict=True))
    return flushes, end - start, versions - rows


def _settle(server: Postgres, database: str, close: Callable[[], None]) -> None:
    close()
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = %s"
    deadline = time.monotonic() + 10
    while server.execute(query, database, _NAME) != [(0,)]:
        if time.monotonic() > deadline:
            raise TimeoutError("The app that is counted is still connected.")
        time.sleep(0.02)


def _position(server: Postgres) -> float:
    return float(server.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])


def _statistics(server: Postgres, database: str) -> tuple[float, float, float]:
    """Flushes of the log, versions of rows written, and rows that there are."""

    def one(query: str) -> Any:
        return server.execute(query, database=database)[0][0]

    tables = server.execute("SELECT relname FROM pg_stat_user_tables", database=database)
    rows = sum(one(f'SELECT count(*) FROM "{name}"') for (name,) in tables)
    return float(one(_FLUSHES)), float(one(_TABLES)), float(rows)
