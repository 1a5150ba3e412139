"""What goes wrong: workers killed and frozen in their views, and a database that is shut down at once."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.acceptance.proof.app import LEASE
from tests.acceptance.proof.history import Event
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy, Rule
from tests.support.server import GunicornServer

#: Seconds between two faults, and between two restarts of the database.
BETWEEN = (0.05, 0.35)
BETWEEN_RESTARTS = 8.0

#: How many of the faults in views freeze a worker rather than kill it, and for how long: past its lease, or not quite.
FREEZING = 0.3
#: How many views begin between two of these: a machine that is slow must not be left with nothing but faults.
VIEWS_BETWEEN = 4
FROZEN = (0.3 * LEASE, 2.0 * LEASE)

#: How often the database's reply to a statement is lost, and to which: a commit of the app's, what the extension does.
LOSING = 0.4
STATEMENTS = ["COMMIT", "INSERT INTO idempotency_keys", "UPDATE idempotency_keys"]


class Running:
    """The views that are running, as the app's log has it."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._rest = ""
        self._views: dict[str, int] = {}
        self.begun = 0  #: how many views have
        self.events: list[Event] = []

    def read(self) -> dict[str, int]:
        """Each running view's run and worker, as of now."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for event in (Event(**json.loads(line)) for line in lines):
            self.events.append(event)
            if event.kind == "begun":
                self._views[event.run] = event.pid
                self.begun += 1
            elif event.kind in ("ended", "failed"):
                self._views.pop(event.run, None)
        return self._views

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


class Faults:
    """Chooses and commits the faults.

    :ivar counts: ``kills`` of workers, ``views killed`` by them, ``stops``, ``restarts``, ``lost replies``.
    """

    def __init__(
        self, server: GunicornServer, postgres: Postgres, wire: CuttingProxy, running: Running, seed: object
    ) -> None:
        self.server = server
        self.postgres = postgres
        self.wire = wire
        self.running = running
        self.counts: Counter[str] = Counter()
        self._dice = random.Random(f"faults {seed}")
        self._frozen: tuple[int, float] | None = None
        self._struck = 0
        self._losing: Rule | None = None

    def commit(self, seconds: float) -> None:
        """Go on for so long; then thaw who is frozen, and wait for all workers to be there."""
        begun = time.monotonic()
        restarts = max(1, round(seconds / BETWEEN_RESTARTS))
        due = [begun + seconds * (one + self._dice.uniform(0.3, 0.7)) / restarts for one in range(restarts)]
        while (now := time.monotonic()) < begun + seconds:
            if due and now > due[0]:
                due.pop(0)
                self.postgres.crash()
                self.counts["restarts"] += 1
            if self._frozen is not None and now > self._frozen[1]:
                self._thaw()
            self._lose_a_reply()
            self._strike()
            time.sleep(self._dice.uniform(*BETWEEN))
        self._lose_nothing()
        self._thaw()
        self._wait_for_workers()

    def _strike(self) -> None:
        """Freeze a worker that is in a view, and make sure that it is; then kill it, or let it stand for a while."""
        frozen = None if self._frozen is None else self._frozen[0]
        alive = set(self.server.pids)
        inside = sorted({pid for pid in self.running.read().values() if pid in alive and pid != frozen})
        if not inside or self.running.begun < self._struck + VIEWS_BETWEEN:
            return
        self._struck = self.running.begun
        pid = self._dice.choice(inside)
        try:
            self.server.freeze(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return
        if pid not in self.running.read().values():
            self.server.thaw(pid)
        elif frozen is None and self._dice.random() < FREEZING:
            self.counts["stops"] += 1
            self._frozen = (pid, time.monotonic() + self._dice.uniform(*FROZEN))
        else:
            self.server.kill(pid)
            self.counts["kills"] += 1
            self.counts["views killed"] += sum(one == pid for one in self.running.read().values())

    def _lose_a_reply(self) -> None:
        """Have the database carry out what comes next of a kind, and nobody told."""
        self._lose_nothing()
        self.wire.statements.clear()  # a long run would fill the memory with them
        if self._dice.random() < LOSING:
            self._losing = self.wire.lose_reply(self._dice.choice(STATEMENTS))

    def _lose_nothing(self) -> None:
        if self._losing is not None:
            self._losing.left = 0
            self.counts["lost replies"] += self._losing.count
        self._losing = None

    def _thaw(self) -> None:
        if self._frozen is not None:
            with contextlib.suppress(ProcessLookupError):
                self.server.thaw(self._frozen[0])
        self._frozen = None

    def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + 10
        while len(self.server.pids) < self.server.workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"gunicorn has too few workers:\n{self.server.log}")
            time.sleep(0.02)
