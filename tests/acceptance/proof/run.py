"""The proof: clients, proxy, app, provider, database and faults, put together for some seconds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.proof.clients import Clients, workload
from tests.acceptance.proof.cutter import AnswerCutter
from tests.acceptance.proof.faults import Faults, Running
from tests.acceptance.proof.history import MODES, SIGNALS, Answer, Charge, Event, History, Mode, Row
from tests.acceptance.proof.provider import Provider
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy
from tests.support.server import GunicornServer

APP = "tests.acceptance.proof.app:create_app()"
CLIENTS = 10
WORKERS = 3


@dataclass
class Proof:
    """What a run gave: its history, how much has happened in it, and the end of the server's log."""

    history: History
    figures: Counter[str]
    log: str

    def __str__(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in self.figures.items())


@dataclass
class Stage:
    """The app under gunicorn, what it needs, and what stands in between."""

    postgres: Postgres
    database: str
    log: Path
    wire: CuttingProxy  #: between the app and the database
    provider: Provider
    server: GunicornServer
    cutter: AnswerCutter  #: between the clients and the app


@contextlib.contextmanager
def staged(postgres: Postgres, seed: object) -> Iterator[Stage]:
    """Everything up, for the length of a ``with`` block."""
    database = postgres.create_database()
    driver = random.Random(f"driver {seed}").choice(["psycopg2", "psycopg"])
    with contextlib.ExitStack() as ending:
        log = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="idempotency-proof-"))) / "log"
        wire = CuttingProxy(postgres.socket)
        ending.callback(wire.stop)
        provider = Provider()
        ending.callback(provider.stop)
        env = {
            "PROOF_SQLALCHEMY_DATABASE_URI": wire.url(database, driver),
            "PROOF_LOG": str(log),
            "PROOF_PROVIDER": str(provider.port),
            "PROOF_SECRET_KEY": "a secret of the proof",
        }
        server = GunicornServer(APP, worker_class="gthread", threads=4, workers=WORKERS, preload=True, env=env)
        ending.callback(server.stop)
        ending.callback(os.killpg, server.pid, signal.SIGKILL)  # it has served its purpose, and its grace takes time
        cutter = AnswerCutter((server.host, server.port), seed)
        ending.callback(cutter.stop)
        yield Stage(postgres, database, log, wire, provider, server, cutter)


def prove(postgres: Postgres, *, seconds: float, seed: object, paths: dict[str, Mode] | None = None) -> Proof:
    """Let clients and faults have the app for so long, and return what was seen.

    :param postgres: a server that is nobody else's: it will be shut down, several times.
    :param paths: the routes that take part, and the mode that each is to be held to; all guarded ones if left out.
    """
    with staged(postgres, seed) as stage, contextlib.closing(Running(stage.log)) as running:
        operations = workload(paths or {mode: mode for mode in MODES}, seed)
        clients = Clients((stage.cutter.host, stage.cutter.port), operations, CLIENTS, seed)
        faults = Faults(stage.server, postgres, stage.wire, running, seed)
        faults.commit(seconds)
        clients.finish()
        again = ask_again((stage.server.host, stage.server.port), clients)
        running.read()
        history = collect(stage, clients, again, running.events)
        return Proof(history, figures(history, clients, stage.cutter, faults), stage.server.log[-3000:])


def ask_again(address: tuple[str, int], clients: Clients) -> list[Answer]:
    """When all is over, ask once more for each operation, past the proxy: it is a retry as any other."""
    operations = list(clients.operations.values())
    quiet = Clients(address, iter(operations), 4, "again")
    quiet.finish(rest=True, timeout=600)
    clients.stuck += quiet.stuck
    return quiet.answers


def collect(stage: Stage, clients: Clients, again: list[Answer], events: list[Event]) -> History:
    """The history, from everybody who saw a part of it."""
    rows: list[tuple[Any, ...]] = stage.postgres.execute("SELECT id, key, run FROM payment", database=stage.database)
    return History(
        modes={key: operation.mode for key, operation in clients.operations.items()},
        answers=[*clients.answers, *again],
        stuck=clients.stuck,
        events=events,
        rows=[Row(*row) for row in rows],
        charges=[Charge(**{**one, "runs": tuple(one["runs"])}) for one in stage.provider.charges()],
    )


def figures(history: History, clients: Clients, cutter: AnswerCutter, faults: Faults) -> Counter[str]:
    """How much has happened."""
    told = {name.replace("_", " "): history.count(name).total() for name in SIGNALS}
    return Counter(
        {
            "keys": len(history.modes),
            **clients.counts,
            **faults.counts,
            **cutter.counts,
            **told,
            "rows": len(history.rows),
            "charges": len(history.charges),
        }
    )
