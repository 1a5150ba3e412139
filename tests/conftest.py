"""Fixtures for every test: databases on several engines and drivers, proxies, and server processes."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from flask_idempotency.heartbeat import heartbeat
from tests.support.drivers import left_out
from tests.support.mariadb import MariaDB
from tests.support.postgres import PgBouncer, Postgres
from tests.support.proxy import CuttingProxy
from tests.support.server import GunicornServer

# Threads and databases make an example's duration a matter of luck. In CI the same examples are tried every time.
settings.register_profile("default", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("default")

# A developer's own PGHOST, PGPORT, PGOPTIONS … must not lead a driver, or the server, elsewhere.
for name in [name for name in os.environ if name.startswith("PG")]:
    del os.environ[name]


# SQLite waits for the disk at each commit. No test looks at what a power failure would leave, so files go to memory
# where there is room for them.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2**29:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


# In CPython 3.11 a garbage collection can begin while an object's `__dict__` is being made; if a finalizer then lets
# another thread make the same one, the process crashes (3.12 collects at safe points only). Threads that compile one
# SQLAlchemy statement at once do that, and left-over connections have such finalizers. So there the collector runs
# between tests, when the threads are gone.
if sys.version_info[:2] == (3, 11):
    gc.disable()

    def pytest_collection_finish() -> None:
        """Keep what importing and collecting have made out of the collections to come, which makes them quick."""
        gc.collect()
        gc.freeze()

    ended = count(1)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown() -> None:
        """Collect, now and then, what tests and their fixtures have left."""
        if next(ended) % 200 == 0:
            gc.collect()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose twin, on another database, runs this time."""
    twins = left_out(items, os.environ.get("IDEMPOTENCY_TESTS_TURN", "1"))
    if twins:
        config.hook.pytest_deselected(items=twins)
        gone = set(twins)
        items[:] = [item for item in items if item not in gone]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a binary parameter by its length: its bytes may differ between workers (gzip's hold the time of day)."""
    if isinstance(val, bytes) and not (len(val) <= 20 and val.decode("latin-1").isprintable()):
        return f"{len(val)} bytes"
    return None


@pytest.fixture(autouse=True)
def log_is_on() -> None:
    """What an earlier test ran may have switched off the log: Alembic's set-up does, and so does a page of the docs."""
    log = logging.getLogger("flask_idempotency")
    log.disabled = False
    log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def nothing_is_left_to_renew() -> Iterator[None]:
    """What a test leaves is neither renewed nor settled during the next one, whose statements may be counted."""
    yield
    with heartbeat._changed:
        for left in (heartbeat._live, heartbeat._postponed, heartbeat._unheard):
            left.clear()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A real PostgreSQL, one for each worker of the test run, started by the first test that wants it."""
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture
def postgres_database(postgres_server: Postgres) -> Iterator[str]:
    """The name of a fresh database on that server."""
    name = postgres_server.create_database()
    yield name
    postgres_server.drop_database(name)


@pytest.fixture
def postgres_url(postgres_server: Postgres, postgres_database: str) -> str:
    """SQLAlchemy's URL of the fresh database, for psycopg2."""
    return postgres_server.url(postgres_database, "psycopg2")


@pytest.fixture
def psycopg_url(postgres_server: Postgres, postgres_database: str) -> str:
    """SQLAlchemy's URL of the same database, for psycopg 3."""
    return postgres_server.url(postgres_database, "psycopg")


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDB]:
    """A real MariaDB, one for each worker of the test run, started by the first test that wants it."""
    server = MariaDB()
    yield server
    server.stop()


@pytest.fixture
def mariadb_database(mariadb_server: MariaDB) -> Iterator[str]:
    """The name of a fresh database on that server, whose texts are utf8mb4 by default, and compared inexactly."""
    with mariadb_server.database("utf8mb4", "utf8mb4_general_ci") as name:
        yield name


@pytest.fixture
def mariadb_url(mariadb_server: MariaDB, mariadb_database: str) -> str:
    """SQLAlchemy's URL of the fresh database, for its dialect ``mariadb``."""
    return mariadb_server.url(mariadb_database, "mariadb")


@pytest.fixture
def mysql_url(mariadb_server: MariaDB, mariadb_database: str) -> str:
    """SQLAlchemy's URL of the same database, for its dialect ``mysql``."""
    return mariadb_server.url(mariadb_database, "mysql")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """SQLAlchemy's URL of a fresh SQLite file."""
    return f"sqlite:///{tmp_path / 'test.sqlite'}"


@pytest.fixture(params=["sqlite", "postgresql-psycopg2", "postgresql-psycopg3"])
def database_url(request: pytest.FixtureRequest) -> str:
    """SQLAlchemy's URL of a fresh database: a test with it runs once for each engine and driver."""
    fixtures = {"sqlite": "sqlite_url", "postgresql-psycopg2": "postgres_url", "postgresql-psycopg3": "psycopg_url"}
    return str(request.getfixturevalue(fixtures[request.param]))


@pytest.fixture(params=["psycopg2", "psycopg"])
def driver(request: pytest.FixtureRequest) -> str:
    """The name of a PostgreSQL driver, as in SQLAlchemy's URLs: a test with it runs once for each."""
    return str(request.param)


@pytest.fixture
def cutting_proxy(postgres_server: Postgres) -> Iterator[CuttingProxy]:
    """A TCP proxy in front of the server, which can lose replies, hang and go away."""
    proxy = CuttingProxy(postgres_server.socket)
    yield proxy
    proxy.stop()


@pytest.fixture
def tcp_url(cutting_proxy: CuttingProxy, postgres_database: str, driver: str) -> str:
    """SQLAlchemy's URL of the fresh database through the TCP proxy, once for each driver."""
    return cutting_proxy.url(postgres_database, driver)


@pytest.fixture
def pgbouncer(postgres_server: Postgres) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode with two server connections for each database."""
    bouncer = PgBouncer(postgres_server)
    yield bouncer
    bouncer.stop()


@pytest.fixture
def gunicorn() -> Iterator[Callable[..., GunicornServer]]:
    """A function that starts an app under gunicorn, as often as a test likes; all of them are stopped at its end.

    Takes what :class:`tests.support.server.GunicornServer` takes.
    """
    servers: list[GunicornServer] = []

    def start(app: str, **options: Any) -> GunicornServer:
        servers.append(GunicornServer(app, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
        print(f"--- gunicorn on port {server.port}\n{server.log}")  # pytest shows it when the test has failed
