"""Fixtures for tests with real server processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.shop import Served, engine_options
from tests.support.apps import close, make_shop
from tests.support.barrier import together
from tests.support.postgres import Postgres
from tests.support.server import GunicornServer

#: A lease that a test can wait for, and long enough for a process that shares two cores with others.
LEASE = 1.5


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two servers on two ports over one database, one worker with eight threads each; once for each engine.

    On PostgreSQL one of them uses psycopg2 and the other psycopg 3.
    """
    folder = tmp_path_factory.mktemp("two")
    server: Postgres | None = None
    name = ""
    urls = [f"sqlite:///{folder / 'shop.sqlite'}"] * 2
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres_server")
        name = server.create_database()
        urls = [server.url(name, driver) for driver in ("psycopg2", "psycopg")]
    shop = make_shop(urls[0], engine_options=engine_options(urls[0]))
    served = Served(folder, urls[0], {"lock_timeout": LEASE, "pool_size": 3}, GunicornServer, shop, [])
    try:
        together(2, lambda number: served.start(url=urls[number], worker_class="gthread", threads=8))
        yield served
    finally:
        for one in served.servers:
            end(one)
            one.stop()
            print(f"--- gunicorn on port {one.port}\n{one.log}")
        close(shop.app)
        if server is not None:
            server.drop_database(name)


@pytest.fixture
def serve(tmp_path: Path, gunicorn: Callable[..., GunicornServer]) -> Iterator[Callable[..., Served]]:
    """A function that prepares a database for servers of the app; takes ``IDEMPOTENCY_…`` keys in lower case."""
    made: list[Served] = []

    def prepare(url: str, **config: Any) -> Served:
        shop = make_shop(url, engine_options=engine_options(url))
        made.append(Served(tmp_path, url, config, gunicorn, shop, []))
        return made[-1]

    yield prepare
    for one in made:
        for server in one.servers:
            end(server)
        close(one.shop.app)


def end(server: GunicornServer) -> None:
    """End a server that has served its purpose at once, rather than wait for its workers' grace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
