"""The proof: clients, proxy, app, provider, database and faults, put together for some seconds."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.proof.clients import Clients, Workload, ask
from tests.acceptance.proof.cutter import AnswerCutter
from tests.acceptance.proof.faults import Faults, Running
from tests.acceptance.proof.history import MODES, Answer, Charge, History, Mode, Row
from tests.acceptance.proof.provider import Provider
from tests.support.barrier import together
from tests.support.postgres import Postgres
from tests.support.server import GunicornServer

CLIENTS = 10
WORKERS = 3


@dataclass
class Proof:
    """What a run gave: its history, and how much has happened in it."""

    history: History
    figures: Counter[str]

    def __str__(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in self.figures.items())


@contextlib.contextmanager
def served(postgres: Postgres, database: str, folder: Path) -> Iterator[tuple[GunicornServer, Provider]]:
    """The app and its provider."""
    provider = Provider()
    try:
        env = {
            "PROOF_SQLALCHEMY_DATABASE_URI": postgres.url(database, "psycopg2"),
            "PROOF_LOG": str(folder / "log"),
            "PROOF_PROVIDER": str(provider.port),
            "PROOF_SECRET_KEY": "a secret of the proof",
        }
        app = "tests.acceptance.proof.app:create_app()"
        server = GunicornServer(app, worker_class="gthread", threads=4, workers=WORKERS, preload=True, env=env)
        try:
            yield server, provider
        finally:
            server.stop()
    finally:
        provider.stop()


def prove(postgres: Postgres, *, seconds: float, seed: object, paths: dict[str, Mode] | None = None) -> Proof:
    """Let clients and faults have the app for so long, and return what was seen.

    :param postgres: a server that is nobody else's: it will be shut down, several times.
    :param paths: the routes that take part, and the mode that each is to be held to; all guarded ones if left out.
    """
    database = postgres.create_database()
    with tempfile.TemporaryDirectory(prefix="idempotency-proof-") as name:
        folder = Path(name)
        with served(postgres, database, folder) as (server, provider):
            cutter = AnswerCutter((server.host, server.port), seed)
            running = Running(folder / "log")
            workload = Workload(paths or {mode: mode for mode in MODES}, seed)
            clients = Clients((cutter.host, cutter.port), workload, CLIENTS, seed)
            faults = Faults(server, postgres, running, seed)
            try:
                faults.commit(seconds)
                clients.finish()
                again = ask_again((server.host, server.port), clients)
                running.read()
                history = collect(clients, again, running, provider, postgres, database)
            finally:
                cutter.stop()
                running.close()
    return Proof(history, figures(history, clients, cutter, faults))


def ask_again(address: tuple[str, int], clients: Clients) -> list[Answer]:
    """When all is over, ask once more for each operation, past the proxy: it is a retry as any other."""
    operations = list(clients.operations.values())

    def some(number: int) -> list[Answer]:
        return [ask(address, one, 20) for one in operations[number::4]]

    return [answer for answers in together(4, some, timeout=600) for answer in answers]


def collect(
    clients: Clients, again: list[Answer], running: Running, provider: Provider, postgres: Postgres, database: str
) -> History:
    """The history, from everybody who saw a part of it."""
    rows: list[tuple[Any, ...]] = postgres.execute("SELECT id, key, run FROM payment", database=database)
    return History(
        modes={key: operation.mode for key, operation in clients.operations.items()},
        answers=[*clients.answers, *again],
        stuck=clients.stuck,
        events=running.events,
        rows=[Row(*row) for row in rows],
        charges=[Charge(**{**one, "runs": tuple(one["runs"])}) for one in provider.charges()],
    )


def figures(history: History, clients: Clients, cutter: AnswerCutter, faults: Faults) -> Counter[str]:
    """How much has happened."""
    names = ("taken_over", "released", "claim_lost", "record_failed")
    told = {name.replace("_", " "): history.count(name).total() for name in names}
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
