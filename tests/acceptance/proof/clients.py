"""Clients that retry until they have a final answer, and what they were given."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.acceptance.proof.app import LEASE
from tests.acceptance.proof.history import Answer, Mode
from tests.support.barrier import background

IN_FLIGHT = "urn:problem-type:idempotency:in-flight"

#: How many operations are asked for by two or three clients at once, and how many the view declines.
SHARED = 0.3
DECLINED = 0.05

#: Once the faults have ended, a client waits for lease + 1 s, and gives up after so many tries more.
PATIENCE = 20


@dataclass(frozen=True)
class Operation:
    """One payment."""

    key: str
    mode: Mode
    path: str
    decline: bool


def workload(paths: dict[str, Mode], seed: object) -> Iterator[Operation]:
    """Operations without end, in an order that the seed decides; shared ones several times in a row.

    :param paths: the routes that take part, and what each is to be held to.
    """
    dice = random.Random(f"workload {seed}")
    for number in itertools.count():
        path = dice.choice(list(paths))
        operation = Operation(f"{path}-{number:06}", paths[path], path, dice.random() < DECLINED)
        yield from [operation] * (dice.choice([2, 3]) if dice.random() < SHARED else 1)


class Clients:
    """Threads that work through a workload until its end, or :meth:`finish`.

    :ivar operations: those that were begun, by key.
    :ivar answers: the final answers.
    :ivar stuck: the keys for which a client gave up after the faults had ended.
    :ivar counts: ``operations``, ``retries``, ``replays``, ``holds``; each retry's reason.
    """

    def __init__(self, address: tuple[str, int], operations: Iterator[Operation], number: int, seed: object) -> None:
        self.address = address
        self.operations: dict[str, Operation] = {}
        self.answers: list[Answer] = []
        self.stuck: list[str] = []
        self.counts: Counter[str] = Counter()
        self._next = operations
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._quiet_since: float | None = None
        dice = [random.Random(f"client {one} {seed}") for one in range(number)]
        self._futures = [background(self._work, one) for one in dice]

    def finish(self, *, rest: bool = False, timeout: float = 60.0) -> None:
        """The faults have ended: wait until all operations that have begun are answered; the rest of them as well?"""
        self._quiet_since = time.monotonic()
        if not rest:
            self._ending.set()
        for future in self._futures:
            future.result(timeout)

    def _work(self, dice: random.Random) -> None:
        while not self._ending.is_set():
            with self._lock:
                operation = next(self._next, None)
                if operation is None:
                    return
                self.operations[operation.key] = operation
            self._note("operations")
            self._settle(operation, dice)

    def _settle(self, operation: Operation, dice: random.Random) -> None:
        patience = PATIENCE
        while True:
            since = self._quiet_since
            late = since is not None and time.monotonic() > since + LEASE + 1
            answer = self._try(operation, dice.uniform(0.5, 4.0))
            if answer is not None:
                return self._final(answer)
            if late and not (patience := patience - 1):
                with self._lock:
                    self.stuck.append(operation.key)
                return None
            time.sleep(dice.uniform(0.02, 0.1))

    def _try(self, operation: Operation, timeout: float) -> Answer | None:
        """A final answer, or none if the operation is to be retried."""
        try:
            answer = ask(self.address, operation, timeout)
        except (OSError, http.client.HTTPException) as error:
            self._note("retries", f"after {type(error).__name__}")
            return None
        if answer.status >= 500 or (answer.status == 409 and IN_FLIGHT in answer.body):
            self._note("retries", f"after {answer.status}")
            return None
        return answer

    def _final(self, answer: Answer) -> None:
        self._note(*(["replays"] if answer.replay else []), *(["holds"] if answer.held else []))
        with self._lock:
            self.answers.append(answer)

    def _note(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)


def ask(address: tuple[str, int], operation: Operation, timeout: float) -> Answer:
    """Send the request once.

    :raises OSError: no answer, or not in time. As :class:`http.client.HTTPException`: a part of an answer.
    """
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    headers = {"Idempotency-Key": operation.key, "Content-Type": "application/json", "Connection": "close"}
    with contextlib.closing(connection):
        connection.request("POST", f"/{operation.path}", json.dumps({"decline": operation.decline}).encode(), headers)
        response = connection.getresponse()
        body = response.read().decode()
    if not body:  # cut within its headers, which the library takes for their end
        raise http.client.HTTPException("The answer has no body.")
    replay = response.headers.get("Idempotent-Replay") == "true"
    run = json.loads(body).get("run") if response.status < 500 else None  # Flask's own 500 is a page
    return Answer(operation.key, response.status, body, replay, run)
