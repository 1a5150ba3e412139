"""What each subject goes through: timed in process, raced, killed, and under load."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, Final

import sqlalchemy as sa

from tests.support.server import Server

from .. import calls, load, servers
from ..interleaved import Series, interleaved, timed
from .subjects import Subject

GUARDED: Final = "/charge"
PLAIN: Final = "/plain/charge"
DUPLICATES: Final = 50
LEASE: Final = 2
AMOUNTS: Final = itertools.count(1000)
BARE, FIRST, REPLAY = "bare view", "first run", "replay"
#: How many recorded keys are replayed in turn under load: a guard with a lock for each key may refuse the next.
RECORDED: Final = 32
#: How a request ends whose process is killed.
BROKEN: Final = ("RemoteDisconnected", "ConnectionResetError")


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of those packages that are there."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def create_table() -> None:
    """The table that every view inserts into."""
    sql("CREATE TABLE charge (id serial PRIMARY KEY, amount integer NOT NULL)")


def sql(statement: str) -> Any:
    """The first value that a statement returns, if it returns rows."""
    engine = sa.create_engine(os.environ["BENCH_DATABASE"], poolclass=sa.NullPool)
    with engine.begin() as connection:
        result = connection.exec_driver_sql(statement)
        return result.scalar() if result.returns_rows else None


def charges(amount: int) -> int:
    """How often the view ran for an amount."""
    return int(sql(f"SELECT count(*) FROM charge WHERE amount = {amount}"))


def in_process(subject: Subject, rounds: int, count: int) -> dict[str, Series]:
    """The measurements in one thread, in a process of their own: peers have settings and threads in theirs."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(timed_paths, subject, rounds, count).result()


def timed_paths(subject: Subject, rounds: int, count: int) -> dict[str, Series]:
    """The measurements in this process; the replay is of a key that is recorded here."""
    send = asgi_sender(subject.create()) if subject.asgi else calls.sender(subject.create(), 201)
    recorded = calls.new_key()
    send(calls.environ(GUARDED, recorded))
    environs = {
        BARE: lambda: calls.environ(PLAIN, calls.new_key()),
        FIRST: lambda: calls.environ(GUARDED, calls.new_key()),
        REPLAY: lambda: calls.environ(GUARDED, recorded),
    }
    return interleaved({path: timed(send, fresh, count) for path, fresh in environs.items()}, rounds)


def asgi_sender(app: Any) -> Callable[[Any], None]:
    """The same as ``calls.sender`` for an ASGI app, on an event loop of its own."""
    loop = asyncio.new_event_loop()
    lifespan = app.router.lifespan_context(app)
    app.state.lifespan = lifespan  # collected, it would close the connections
    loop.run_until_complete(lifespan.__aenter__())

    async def serve(given: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"x-tenant", calls.TENANT.encode())]
        headers.append((b"idempotency-key", given["HTTP_IDEMPOTENCY_KEY"].encode()))
        scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
        scope |= {"path": given["PATH_INFO"], "raw_path": given["PATH_INFO"].encode(), "query_string": b""}
        scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)}
        scope |= {"scheme": "http", "root_path": ""}
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": calls.BODY, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        if sent[0]["status"] != 201:
            raise RuntimeError(f"{sent[0]['status']} instead of 201: {sent[1:]}")

    return lambda given: loop.run_until_complete(serve(given))


@contextlib.contextmanager
def served(subject: Subject, lease: int = 30) -> Iterator[Server]:
    """A subject under its server: gunicorn, or uvicorn with two processes."""
    env = {name: os.environ[name] for name in ("BENCH_DATABASE", "BENCH_REDIS")} | {"BENCH_LEASE": str(lease)}
    if not subject.asgi:
        with servers.gunicorn(subject.factory, env) as server:
            yield server
        return
    line = [sys.executable, "-m", "uvicorn", f"benchmarks.others.{subject.module}:create", "--factory"]
    server = Server(lambda fd: [*line, "--fd", str(fd), "--workers", "2"], workers=2, env=env)
    try:
        yield server
    finally:
        server.stop()


def post(server: Server, key: str, amount: int, **headers: str) -> str:
    """Send a request; its status, or the name of the error when the connection breaks."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    given = {"Idempotency-Key": key, "X-Tenant": calls.TENANT, "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("POST", GUARDED, f'{{"amount": {amount}}}', given)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def race(subject: Subject, rounds: int) -> tuple[list[int], str]:
    """Executions in each round, and how many answers there were of each status."""
    runs: list[int] = []
    answers: list[str] = []
    with served(subject) as server:
        for _ in range(rounds):
            key, amount = calls.new_key(), next(AMOUNTS)
            barrier = threading.Barrier(DUPLICATES)

            def send(key: str = key, amount: int = amount, barrier: threading.Barrier = barrier) -> None:
                barrier.wait(30)
                answers.append(post(server, key, amount, X_Pause="0.02"))

            threads = [threading.Thread(target=send) for _ in range(DUPLICATES)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            runs.append(charges(amount))
    return runs, ", ".join(f"{count} × {status}" for status, count in sorted(collections.Counter(answers).items()))


def kill(subject: Subject) -> tuple[int, str]:
    """Charges after a retry that comes when the lock of the killed process has run out, and its status."""
    key, amount = calls.new_key(), next(AMOUNTS)
    with served(subject, LEASE) as server:
        first = post(server, key, amount, X_Kill="1")
        if first not in BROKEN:
            raise RuntimeError(f"{first} instead of a connection that breaks: was the process killed?")
        time.sleep(LEASE + 0.5)
        status = post(server, key, amount)
    return charges(amount), status


def load_paths(subject: Subject, rounds: int, seconds: float) -> dict[str, Series]:
    """Requests a second and the time of an answer, for each path."""
    keys = [calls.new_key() for _ in range(RECORDED)]
    recorded = itertools.cycle(keys)
    messages = {
        BARE: lambda: load.message(PLAIN, calls.new_key()),
        FIRST: lambda: load.message(GUARDED, calls.new_key()),
        REPLAY: lambda: load.message(GUARDED, next(recorded)),
    }
    with (
        served(subject) as server,
        load.Load(server.host, server.port, servers.WORKERS * servers.THREADS) as generator,
    ):
        for key in keys:
            post(server, key, 100)
        variants = {path: lambda make=make: generator.measure(make, 201, seconds) for path, make in messages.items()}
        return interleaved(variants, rounds)
