"""The app that the acceptance tests serve, and how they look into it.

Requests steer the view by headers, which do not count in a fingerprint; what happens is told in a folder that the
test and all processes share: one file a key for its runs, and one that holds the view as long as it is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from flask import Flask, request

from tests.support.apps import Shop, make_shop, until
from tests.support.server import Server

#: Requests are for test servers, which answer soon or never.
TIMEOUT = 25


class Broken(Exception):
    """What a view fails with."""


def create_app() -> Flask:
    """The app of :func:`create_shop`."""
    return create_shop().app


def create_shop() -> Shop:
    """A shop on ``SHOP_DATABASE``, with routes ``/work`` and ``/pay`` that a test can hold, and one without needs."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(process)d %(message)s")
    folder, url = Path(os.environ["SHOP_FOLDER"]), os.environ["SHOP_DATABASE"]
    shop = make_shop(url, engine_options=engine_options(url), **json.loads(os.environ["SHOP_CONFIG"]))
    with shop.app.app_context():
        shop.db.engine.dispose()  # of what creating the tables has opened: workers may be forked from here

    def hold(name: str) -> None:
        (folder / f"reached-{name}").touch()
        while (folder / name).exists():
            time.sleep(0.01)

    def begun() -> str:
        key = request.headers["Idempotency-Key"]
        with (folder / f"runs-{key}").open("a") as runs:
            runs.write(f"{os.getpid()}\n")
        hold(f"before-{key}")
        fail("before")
        return key

    def fail(where: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (folder / f"fail-{where}").unlink()
            raise Broken

    @shop.app.post("/work")
    @shop.idempotency.required
    def work() -> tuple[dict[str, Any], int]:
        key = begun()
        charge = shop.Charge(amount=request.get_json()["amount"])
        shop.db.session.add(charge)
        shop.db.session.commit()
        answer = {"id": charge.id, "amount": charge.amount}
        shop.db.session.remove()
        hold(f"after-{key}")
        fail("after")
        return answer, 201

    @shop.app.post("/pay")
    @shop.idempotency.required
    def pay() -> tuple[dict[str, Any], int]:
        key = begun()

        def charge() -> dict[str, int]:
            with (folder / f"charged-{key}").open("a") as charges:
                charges.write(f"{os.getpid()}\n")
            return {"by": os.getpid()}

        return shop.idempotency.step("charge", charge), 201

    @shop.app.get("/ping")
    def ping() -> str:
        return str(os.getpid())

    return shop


def engine_options(url: str) -> dict[str, Any]:
    """What an app that looks after its database sets: patience with a busy disk, no preparations behind a proxy."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 20}}
    return {"connect_args": {"prepare_threshold": None}} if "+psycopg:" in url else {}


@dataclass
class Served:
    """Servers of the app over one database, and a shop of the test's own that looks at the same tables."""

    folder: Path
    url: str
    config: dict[str, Any]
    start_server: Callable[..., Server]
    shop: Shop
    servers: list[Server]
    app: str = "tests.acceptance.shop:create_app()"

    def start(self, *, url: str | None = None, **options: Any) -> Server:
        """Start another server; on another driver's URL of the same database, where one is given."""
        env = {
            "SHOP_DATABASE": url or self.url,
            "SHOP_FOLDER": str(self.folder),
            "SHOP_CONFIG": json.dumps(self.config),
        }
        server = self.start_server(self.app, env=env, **options)
        self.servers.append(server)
        return server

    def ask(self, key: str, amount: int = 100, server: int = 0, path: str = "/work") -> requests.Response:
        """Ask one of the servers for a charge, and wait for the answer. Under ``/pay`` another system makes it."""
        headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
        url = f"{self.servers[server].url}{path}"
        return requests.post(url, json={"amount": amount}, headers=headers, timeout=TIMEOUT)

    def runs(self, key: str) -> list[int]:
        """The processes that ran the view for a key, in order."""
        return self._processes(f"runs-{key}")

    def charged(self, key: str) -> list[int]:
        """The processes that had the other system make a charge."""
        return self._processes(f"charged-{key}")

    def _processes(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @contextlib.contextmanager
    def held(self, key: str, where: str = "before") -> Iterator[None]:
        """Hold the view of a key before, or after, its commit."""
        path = self.folder / f"{where}-{key}"
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def running(self, key: str, where: str = "before") -> int:
        """Wait until the view of a key is held, and return the process that runs it."""
        until((self.folder / f"reached-{where}-{key}").exists, 20)
        return self.runs(key)[-1]

    def freeze(self, pid: int) -> None:
        """Freeze a worker of the first server, though not while it holds SQLite's one writer: all would wait for it."""
        while True:
            self.servers[0].freeze(pid)
            if not self.url.startswith("sqlite"):
                return
            with contextlib.closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=0.2)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError:
                    self.servers[0].thaw(pid)

    def row(self, key: str) -> dict[str, Any]:
        """A key's row."""
        (found,) = [one for one in self.shop.rows() if one["key"] == key]
        return found

    @property
    def logs(self) -> str:
        """What all servers have logged."""
        return "\n".join(server.log for server in self.servers)

    def since(self, lengths: list[int]) -> str:
        """What the servers have logged since their logs were so long."""
        return "\n".join(server.log[length:] for server, length in zip(self.servers, lengths, strict=True))

    def logged(self, event: str, key: str) -> int:
        """How often an event of a key stands in the logs."""
        return sum(f"idempotency.{event} key={key} " in line for line in self.logs.splitlines())


def failures(log: str) -> list[str]:
    """The lines of a log that should not be there when nothing fails."""
    wrong = ("ERROR", "CRITICAL", "Traceback", "database is locked")
    return [line for line in log.splitlines() if any(one in line for one in wrong)]


def replayed(answer: requests.Response) -> bool:
    """Whether an answer is a replay."""
    return answer.headers.get("Idempotent-Replay") == "true"
