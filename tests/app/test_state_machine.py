"""The whole extension against a model: random requests, retries, mismatches, crashes, takeovers and expiries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from flask import request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from werkzeug.test import TestResponse

from tests.support.apps import Shop, close, events, make_shop

pytestmark = pytest.mark.each_driver

LEASE = 30
RETENTION = 1000

#: Seconds by which a step can move time. No sum of a run's steps falls within seconds of the lease or the retention,
#: so that the moments which the run itself takes change no expectation.
STEPS = (11, 35, 1100)
assert not any(LEASE - 5 < 11 * a + 35 * b <= LEASE for a in range(4) for b in range(2))

SCOPES = st.sampled_from(["acme", "bolt"])
KEYS = st.sampled_from(["key-number-1", "key-number-2"])
AMOUNTS = st.sampled_from([100, 900])
#: What the view does when it runs, and whether its answer is recorded, or the claim released or left behind.
RECORDED, RELEASED, CRASHED = "recorded", "released", "crashed"
OUTCOMES = {
    "created": (201, RECORDED),
    "declined": (402, RECORDED),
    "not found": (404, RECORDED),
    "unavailable": (503, RELEASED),
    "busy": (429, RELEASED),
    "given up": (201, RELEASED),
    "raises": (500, RELEASED),
    "killed": (None, CRASHED),
}


@dataclass
class Expected:
    """What the model knows of a key."""

    amount: int
    touched: float
    expires: float
    answer: tuple[int, bytes] | None = None

    def lease_over(self, now: float) -> bool:
        return now - self.touched > LEASE

    def expired(self, now: float) -> bool:
        return now >= self.expires and (self.answer is not None or self.lease_over(now))


@dataclass
class World:
    """A shop whose view does what a header says.

    ``happened`` lists, in their order, the runs of the view, the extension's signals, and expiries.
    """

    shop: Shop
    happened: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    #: What the view does in the middle of its next run.
    inside: Any = None

    def runs(self, name: tuple[str, str]) -> int:
        return self.of(name).count("run")

    def of(self, name: tuple[str, str]) -> list[str]:
        """What happened to a key."""
        return [what for what, fields in self.happened if (fields.get("scope"), fields.get("key")) == name]


def make_world(url: str) -> World:
    """The shop; ``X-Outcome`` is no part of the fingerprint, so that a retry may fare otherwise than the first try."""
    world = World(make_shop(url, lock_timeout=LEASE, retention=RETENTION))
    app, idempotency = world.shop.app, world.shop.idempotency

    @app.post("/work")
    @idempotency.required
    def work() -> tuple[dict[str, Any], int]:
        outcome = request.headers["X-Outcome"]
        attempt = idempotency.current
        assert attempt is not None
        world.happened.append(("run", {"scope": attempt.scope, "key": attempt.key}))
        number = len(world.happened)
        if world.inside is not None:
            inside, world.inside = world.inside, None
            inside()
        if outcome == "raises":
            raise RuntimeError("as asked")
        if outcome == "killed":
            raise SystemExit("as asked")
        if outcome == "given up":
            attempt.release()
        status = OUTCOMES[outcome][0]
        assert status is not None
        return {"run": number, "attempts": attempt.attempts}, status

    return world


class Machine(RuleBasedStateMachine):
    """Each rule is a step; each answer is compared with the model's."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.shop = world.shop
        self.now = 0.0
        self.model: dict[tuple[str, str], Expected] = {}

    @initialize()
    def begin(self) -> None:
        self.shop.execute(sa.delete(self.shop.table))
        self.listening = events(self.shop.app)
        self.world.happened = self.listening.__enter__()

    def teardown(self) -> None:
        if not hasattr(self, "listening"):
            return
        self.listening.__exit__(None, None, None)
        for name in {(fields["scope"], fields["key"]) for what, fields in self.world.happened if what == "run"}:
            happened = self.world.of(name)
            runs = [i for i, what in enumerate(happened) if what == "run"]
            for one, other in pairwise(runs):
                assert set(happened[one:other]) & {"released", "taken_over", "expired"}, (name, happened)

    @rule(seconds=st.sampled_from(STEPS))
    def time_passes(self, seconds: int) -> None:
        self.shop.shift(seconds)
        self.now += seconds
        for name, known in self.model.items():
            if known.expired(self.now):
                self.world.happened.append(("expired", {"scope": name[0], "key": name[1]}))

    @rule()
    def prune(self) -> None:
        gone = {name for name, known in self.model.items() if known.expired(self.now)}
        with self.shop.app.app_context():
            assert len(gone) == self.shop.idempotency.prune().deleted
        for name in gone:
            del self.model[name]

    @rule(scope=SCOPES, key=KEYS, amount=AMOUNTS, outcome=st.sampled_from(sorted(OUTCOMES)))
    def ask(self, scope: str, key: str, amount: int, outcome: str) -> None:
        self._ask(scope, key, amount, outcome)

    @rule(scope=SCOPES, key=KEYS, amount=AMOUNTS, outcome=st.sampled_from(sorted(OUTCOMES)), other=AMOUNTS)
    def ask_while_in_flight(self, scope: str, key: str, amount: int, outcome: str, other: int) -> None:
        def inside() -> None:
            answer = self._send(scope, key, other, "created")
            assert (409 if other == amount else 422) == answer.status_code
            elsewhere = self._ask(scope, key + "-not-in-flight", amount, "created")
            assert elsewhere is not None

        self.world.inside = inside
        self._ask(scope, key, amount, outcome)
        self.world.inside = None

    @rule(scope=SCOPES, key=KEYS, amount=AMOUNTS, outcome=st.sampled_from(["created", "unavailable"]))
    def thaw_after_a_takeover(self, scope: str, key: str, amount: int, outcome: str) -> None:
        """A view freezes past its lease, another attempt takes over and answers; the first's end changes nothing."""
        name = (scope, key)
        ran: list[tuple[int, bytes]] = []

        def inside() -> None:
            self.model.pop(name, None)  # whatever was there before has given way to this run
            self.time_passes(35)
            answer = self._send(scope, key, amount, "declined")
            ran.append((answer.status_code, answer.data))

        self.world.inside = inside
        before = self.model.get(name)
        answer = self._send(scope, key, amount, outcome)
        self.world.inside = None
        if not ran:
            assert before is not None
            assert before.amount != amount or before.answer or not before.lease_over(self.now)
            return
        assert (402, OUTCOMES[outcome][0]) == (ran[0][0], answer.status_code)
        assert ["run", "taken_over", "run", "executed", "claim_lost"] == self.world.of(name)[-5:]
        self.model[name] = Expected(amount, self.now, self.now + RETENTION, ran[0])

    @invariant()
    def rows_agree(self) -> None:
        if hasattr(self, "listening"):
            rows = {(row["scope"], row["key"]): row["status"] for row in self.shop.rows()}
            wanted = {name: "completed" if one.answer else "in_progress" for name, one in self.model.items()}
            assert wanted == rows

    def _send(self, scope: str, key: str, amount: int, outcome: str) -> TestResponse:
        headers = {"X-Tenant": scope, "Idempotency-Key": key, "X-Outcome": outcome}
        return self.shop.client.post("/work", json={"amount": amount}, headers=headers)

    def _ask(self, scope: str, key: str, amount: int, outcome: str) -> TestResponse | None:
        name, known = (scope, key), self.model.get((scope, key))
        runs = self.world.runs(name)
        answer = self._sent(scope, key, amount, outcome)
        ran = self.world.runs(name) - runs
        if known is not None and not known.expired(self.now):
            if known.amount != amount:
                assert answer is not None
                assert (0, 422) == (ran, answer.status_code)
                return answer
            if known.answer is not None:
                assert answer is not None
                assert (0, *known.answer, "true") == (
                    ran,
                    answer.status_code,
                    answer.data,
                    answer.headers.get("Idempotent-Replay"),
                )
                return answer
            if not known.lease_over(self.now):
                assert answer is not None
                assert (0, 409, "2") == (ran, answer.status_code, answer.headers.get("Retry-After"))
                return answer
        assert 1 == ran
        self._after_run(name, amount, outcome, answer, known)
        return answer

    def _after_run(
        self, name: tuple[str, str], amount: int, outcome: str, answer: TestResponse | None, known: Expected | None
    ) -> None:
        status, end = OUTCOMES[outcome]
        assert status == (None if answer is None else answer.status_code)
        if end == RELEASED:
            self.model.pop(name, None)
            return
        self.model[name] = Expected(amount, self.now, self.now + RETENTION)
        if end == RECORDED:
            assert answer is not None
            assert "Idempotent-Replay" not in answer.headers
            self.model[name].answer = (answer.status_code, answer.data)

    def _sent(self, scope: str, key: str, amount: int, outcome: str) -> TestResponse | None:
        try:
            return self._send(scope, key, amount, outcome)
        except SystemExit:
            return None


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    """The world on a fresh database, once for each engine and driver."""
    made = make_world(database_url)
    yield made
    close(made.shop.app)


@pytest.mark.timeout(120)
def test_every_answer_is_the_models(world: World) -> None:
    """Whatever is asked in whatever order, each answer is the model's; no key runs twice without a logged reason."""
    run_state_machine_as_test(
        lambda: Machine(world),
        settings=settings(
            max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
