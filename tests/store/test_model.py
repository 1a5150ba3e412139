"""The store against a model of it: whatever happens in whatever order, both say the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flask_idempotency.claim import Claim, Status, Stored
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ask
from tests.store.support import execute, shift

KEYS = ["key-a", "KEY-A", "key-b"]
FINGERPRINTS = ["a" * 64, "b" * 64]
#: Far enough from each other's sums and differences that the seconds of a slow machine decide nothing.
LEASES = [1000.0, 5000.0]
RETENTIONS = [100.0, 20000.0]
STEPS = [600.0, 2300.0, 9500.0, 30500.0]


@dataclass
class Row:
    """What the model knows of a key. Times are the model's own, which only :meth:`Machine.wait` moves."""

    claim: Claim
    fingerprint: str
    policy: str
    locked_at: float
    expires_at: float
    recorded: Recorded | None = None

    def stale(self, now: float) -> bool:
        return self.recorded is None and now > self.locked_at + self.claim.lock_timeout

    def expired(self, now: float) -> bool:
        settled = self.recorded is not None or (self.stale(now) and self.policy == "reexecute")
        return settled and now >= self.expires_at


@dataclass
class Model:
    now: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)
    #: Every claim that was ever granted: most of them are lost by now.
    claims: list[Claim] = field(default_factory=list)

    def holds(self, claim: Claim) -> Row | None:
        row = self.rows.get(claim.key)
        return row if row is not None and row.claim.token == claim.token else None


class Machine(RuleBasedStateMachine):
    """Callers, holders, and the time, at random."""

    store: SQLAlchemyStore

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    @initialize()
    def empty(self) -> None:
        execute(self.store, "DELETE FROM {table}")

    @rule(
        key=st.sampled_from(KEYS),
        fingerprint=st.sampled_from(FINGERPRINTS),
        lease=st.sampled_from(LEASES),
        retention=st.sampled_from(RETENTIONS),
        policy=st.sampled_from(["reexecute", "reexecute", "reject"]),
    )
    def request(self, key: str, fingerprint: str, lease: float, retention: float, policy: str) -> None:
        """Ask for a claim, and try to take over what is in the way, whether it may be or not."""
        model = self.model
        asking = ask(key=key, fingerprint=fingerprint, lock_timeout=lease, retention=retention, stale_policy=policy)
        new = Row(Claim(0, "", key, asking.token, lease), fingerprint, policy, model.now, model.now + retention)
        found = self.store.claim(asking)
        old = model.rows.get(key)
        if old is None:
            assert isinstance(found, Claim)
            self.granted(found, new)
            return
        assert isinstance(found, Stored)
        self.check(found, old)
        taken = self.store.take(asking, found)
        may_take_over = old.stale(model.now) and old.policy == "reexecute" and old.fingerprint == fingerprint
        assert (taken is not None) == (old.expired(model.now) or may_take_over)
        if taken is not None:
            assert taken.attempts == (1 if old.expired(model.now) else old.claim.attempts + 1)
            self.granted(taken, new)

    def granted(self, claim: Claim, row: Row) -> None:
        assert claim.token == row.claim.token
        row.claim = claim
        self.model.rows[claim.key] = row
        self.model.claims.append(claim)

    def check(self, found: Stored, row: Row) -> None:
        now = self.model.now
        assert (found.token, found.fingerprint) == (row.claim.token, row.fingerprint)
        assert (found.attempts, found.stale_policy) == (row.claim.attempts, row.policy)
        assert (found.stale, found.expired, found.recorded) == (row.stale(now), row.expired(now), row.recorded)
        assert found.status is (Status.COMPLETED if row.recorded else Status.IN_PROGRESS)

    @rule(data=st.data(), retention=st.sampled_from(RETENTIONS))
    def record(self, data: st.DataObject, retention: float) -> None:
        """Whoever ever held a claim records an answer; only a present holder succeeds."""
        if claim := self.any_claim(data):
            answer = Recorded(200, (("X-Token", claim.token),), claim.token.encode())
            row = self.model.holds(claim)
            assert self.store.record(claim, answer, retention) == (row is not None)
            if row is not None:
                row.recorded, row.expires_at = answer, self.model.now + retention

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Whoever ever held a claim releases it; only a present holder, who has not recorded, succeeds."""
        if claim := self.any_claim(data):
            row = self.model.holds(claim)
            may = row is not None and row.recorded is None
            assert self.store.release(claim) == may
            if may:
                del self.model.rows[claim.key]

    @rule()
    def renew(self) -> None:
        """Everybody who ever held a claim renews it."""
        held = {row.claim.token: row for row in self.model.rows.values() if row.recorded is None}
        assert self.store.renew(self.model.claims) == set(held)
        for row in held.values():
            row.locked_at = self.model.now

    @rule(seconds=st.sampled_from(STEPS))
    def wait(self, seconds: float) -> None:
        shift(self.store, seconds)
        self.model.now += seconds

    @rule(batch_size=st.integers(1, 3))
    def prune(self, batch_size: int) -> None:
        gone = [key for key, row in self.model.rows.items() if row.expired(self.model.now)]
        assert self.store.prunable() == len(gone)
        assert self.store.prune(batch_size) == min(batch_size, len(gone))
        for key in gone:
            if self.store.find("tenant-1", key) is None:
                del self.model.rows[key]

    def any_claim(self, data: st.DataObject) -> Claim | None:
        return data.draw(st.sampled_from(self.model.claims)) if self.model.claims else None

    @invariant()
    def every_key_is_as_the_model_says(self) -> None:
        for key in KEYS:
            found, row = self.store.find("tenant-1", key), self.model.rows.get(key)
            assert (found is None) == (row is None)
            if found is not None and row is not None:
                self.check(found, row)


def test_the_store_is_as_its_model(store: SQLAlchemyStore) -> None:
    """Random requests, records, releases, renewals, prunings and waits never tell the store from its model."""
    machine: Any = type("Machine", (Machine,), {"store": store})
    quick = settings(max_examples=12, stateful_step_count=25, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=quick)
