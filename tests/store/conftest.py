"""Stores on every back end, and on each database by itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flask_idempotency.store import SQLAlchemyStore
from tests.store.support import BACK_ENDS, opened
from tests.support.mariadb import MariaDB
from tests.support.postgres import Postgres

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of two drivers of one database, one at a time: CI takes the other in another turn. Races meet both each time."""
    for item in items:
        if (
            HERE in item.path.parents
            and item.path.name != "test_races.py"
            and not item.get_closest_marker("each_driver")
        ):
            item.add_marker("one_driver")


@pytest.fixture(autouse=sys.version_info[:2] == (3, 11))
def _no_collection_in_between() -> Iterator[None]:
    """CPython 3.11 can crash where a garbage collection meets threads that use the same objects for the first time.

    It collects in the middle of any allocation, that of an object's ``__dict__`` included. These tests make new
    engines and statements by the hundred, and race with them at once; so what they leave is collected after them.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def shared_database(postgres_server: Postgres) -> Iterator[str]:
    """A database for the tests that need no more than a table of their own."""
    name = postgres_server.create_database()
    yield name
    postgres_server.drop_database(name)


@pytest.fixture
def shared_psycopg2_url(postgres_server: Postgres, shared_database: str) -> str:
    """SQLAlchemy's URL of the shared database, for psycopg2."""
    return postgres_server.url(shared_database, "psycopg2")


@pytest.fixture
def shared_psycopg_url(postgres_server: Postgres, shared_database: str) -> str:
    """SQLAlchemy's URL of the shared database, for psycopg 3."""
    return postgres_server.url(shared_database, "psycopg")


@pytest.fixture(scope="session")
def shared_mariadb(mariadb_server: MariaDB) -> Iterator[str]:
    """A database for the tests that need no more than a table of their own, with defaults that do not suit it."""
    with mariadb_server.database("latin1", "latin1_swedish_ci") as name:
        yield name


@pytest.fixture
def shared_mariadb_url(mariadb_server: MariaDB, shared_mariadb: str) -> str:
    """SQLAlchemy's URL of the shared database, for its dialect ``mysql``."""
    return mariadb_server.url(shared_mariadb)


@pytest.fixture
def memory_url() -> str:
    """SQLAlchemy's URL of SQLite in memory."""
    return "sqlite://"


def _opened(request: pytest.FixtureRequest, name: str) -> Iterator[SQLAlchemyStore]:
    back_end = BACK_ENDS[name]
    url = request.getfixturevalue(back_end.url)
    with opened(url, portable=back_end.portable, memory=back_end.memory) as store:
        yield store


@pytest.fixture(params=list(BACK_ENDS))
def store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """An empty store: a test with it runs once for each back end."""
    yield from _opened(request, request.param)


@pytest.fixture(params=[name for name in BACK_ENDS if name.startswith("postgresql")])
def postgres_store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """An empty store on PostgreSQL, once for each driver."""
    yield from _opened(request, request.param)


@pytest.fixture
def sqlite_store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """An empty store in an SQLite file."""
    yield from _opened(request, "sqlite-file")


@pytest.fixture
def memory_store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """An empty store in SQLite's memory."""
    yield from _opened(request, "sqlite-memory")


@pytest.fixture(params=[name for name in BACK_ENDS if name.startswith("portable")])
def portable_store(request: pytest.FixtureRequest) -> Iterator[SQLAlchemyStore]:
    """An empty store that knows nothing of its database, once for each of two."""
    yield from _opened(request, request.param)
