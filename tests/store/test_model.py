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
    #: The fencing token: the claim's, until somebody settles the key in the holder's place.
    token: str
    status: Status = Status.IN_PROGRESS
    recorded: Recorded | None = None
    steps: dict[str, str] = field(default_factory=dict)
    secret_id: str | None = None

    def stale(self, now: float) -> bool:
        return self.status is Status.IN_PROGRESS and now > self.locked_at + self.claim.lock_timeout

    def expired(self, now: float) -> bool:
        settled = self.status in (Status.COMPLETED, Status.RELEASED) or (self.stale(now) and self.policy == "reexecute")
        return settled and now >= self.expires_at

    @property
    def kept(self) -> bool:
        return bool(self.steps) or self.secret_id is not None


@dataclass
class Model:
    now: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)
    #: Every claim that was ever granted: most of them are lost by now.
    claims: list[Claim] = field(default_factory=list)
    #: What somebody saw before settling or freeing it: most of it has changed by now.
    seen: list[Stored] = field(default_factory=list)

    def holds(self, claim: Claim, *statuses: Status) -> Row | None:
        """The row of a claim, where its token and status are still such."""
        row = self.rows.get(claim.key)
        return row if row is not None and row.token == claim.token and row.status in statuses else None

    def same(self, seen: Stored) -> Row | None:
        """The row that was seen, if it is still as it was."""
        row = self.rows.get(seen.key)
        return row if row is not None and (row.token, row.status) == (seen.token, seen.status) else None


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
        claim = Claim(0, "", key, asking.token, lease)
        new = Row(claim, fingerprint, policy, model.now, model.now + retention, asking.token)
        found = self.store.claim(asking)
        old = model.rows.get(key)
        if old is None:
            assert isinstance(found, Claim)
            self.granted(found, new)
            return
        assert isinstance(found, Stored)
        self.check(found, old)
        taken = self.store.take(asking, found)
        left = old.status is Status.RELEASED or (old.stale(model.now) and old.policy == "reexecute")
        may_take_over = left and old.fingerprint == fingerprint
        assert (taken is not None) == (old.expired(model.now) or may_take_over)
        if taken is not None:
            assert taken.attempts == (1 if old.expired(model.now) else old.claim.attempts + 1)
            if not old.expired(model.now):
                new.steps, new.secret_id = old.steps, old.secret_id
            self.granted(taken, new)

    def granted(self, claim: Claim, row: Row) -> None:
        assert claim.token == row.claim.token
        row.claim = claim
        self.model.rows[claim.key] = row
        self.model.claims.append(claim)

    def check(self, found: Stored, row: Row) -> None:
        now = self.model.now
        assert (found.token, found.fingerprint) == (row.token, row.fingerprint)
        assert (found.attempts, found.stale_policy) == (row.claim.attempts, row.policy)
        assert (found.stale, found.expired, found.recorded) == (row.stale(now), row.expired(now), row.recorded)
        assert found.status is row.status

    @rule(data=st.data(), retention=st.sampled_from(RETENTIONS))
    def record(self, data: st.DataObject, retention: float) -> None:
        """Whoever ever held a claim records an answer; only a present holder succeeds."""
        if claim := self.any_claim(data):
            answer = Recorded(200, (("X-Token", claim.token),), claim.token.encode())
            row = self.model.holds(claim, Status.IN_PROGRESS, Status.COMPLETED)
            assert self.store.record(claim, answer, retention) == (row is not None)
            if row is not None:
                row.status, row.recorded, row.expires_at = Status.COMPLETED, answer, self.model.now + retention

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Whoever ever held a claim releases it; only a present holder, who has not recorded, succeeds."""
        if claim := self.any_claim(data):
            row = self.model.holds(claim, Status.IN_PROGRESS)
            assert self.store.release(claim) == (row is not None)
            if row is not None:
                self.left(row)

    def left(self, row: Row) -> None:
        """The key is claimable: gone, or with its steps."""
        if row.kept:
            row.status, row.recorded, row.locked_at = Status.RELEASED, None, self.model.now
        else:
            del self.model.rows[row.claim.key]

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """Whoever ever held a claim holds the key; only a present holder succeeds, and once more, too."""
        if claim := self.any_claim(data):
            row = self.model.holds(claim, Status.IN_PROGRESS, Status.HELD)
            assert self.store.hold(claim) == (row is not None)
            if row is not None:
                row.status, row.locked_at = Status.HELD, self.model.now

    @rule(data=st.data(), name=st.sampled_from(["charge", "mail"]))
    def step(self, data: st.DataObject, name: str) -> None:
        """Whoever ever held a claim does a step; only a present holder finds the results so far, and adds one."""
        if claim := self.any_claim(data):
            row = self.model.holds(claim, Status.IN_PROGRESS)
            assert self.store.resume(claim) == (row.steps if row else None)
            steps = {**(row.steps if row else {}), name: claim.token}
            assert self.store.keep_steps(claim, steps) == (row is not None)
            if row is not None:
                row.steps, row.locked_at = steps, self.model.now

    @rule(data=st.data(), secret_id=st.sampled_from(["old", "new"]))
    def derive(self, data: st.DataObject, secret_id: str) -> None:
        """Whoever ever held a claim notes a secret; only a present holder is told which one is noted."""
        if claim := self.any_claim(data):
            row = self.model.holds(claim, Status.IN_PROGRESS)
            if row is not None:
                row.secret_id, row.locked_at = row.secret_id or secret_id, self.model.now
            assert self.store.note_secret(claim, secret_id) == (row.secret_id if row else None)

    @rule(key=st.sampled_from(KEYS))
    def look(self, key: str) -> None:
        """Somebody looks a key up, and will settle or free it some time."""
        if found := self.store.find("tenant-1", key):
            self.model.seen.append(found)

    @rule(data=st.data(), force=st.booleans(), retention=st.sampled_from(RETENTIONS))
    def settle(self, data: st.DataObject, force: bool, retention: float) -> None:
        """Whoever saw a key settles it; only as long as it is as it was, and nobody works on it or force is used."""
        if seen := self.any_seen(data):
            row, token = self.model.same(seen), ask().token
            idle = row is not None and (force or row.status is not Status.IN_PROGRESS or row.stale(self.model.now))
            may = idle and row is not None and row.status is not Status.COMPLETED
            answer = Recorded(202, (), token.encode())
            assert self.store.settle(seen, answer, retention, token, force) == may
            if row is not None and may:
                row.status, row.recorded, row.token = Status.COMPLETED, answer, token
                row.expires_at = self.model.now + retention

    @rule(data=st.data(), force=st.booleans(), retention=st.sampled_from(RETENTIONS))
    def free(self, data: st.DataObject, force: bool, retention: float) -> None:
        """Whoever saw a key frees it; a record, and a live claim, by force only."""
        if seen := self.any_seen(data):
            row, token = self.model.same(seen), ask().token
            may = row is not None and (
                row.status is Status.HELD or row.stale(self.model.now) or (force and row.status is not Status.RELEASED)
            )
            assert self.store.free(seen, retention, token, force) == may
            if row is not None and may:
                row.token, row.expires_at = token, self.model.now + retention
                self.left(row)

    @rule()
    def renew(self) -> None:
        """Everybody who ever held a claim renews it."""
        held = {row.token: row for row in self.model.rows.values() if row.status is Status.IN_PROGRESS}
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
        assert self.store.prune(batch_size).count == min(batch_size, len(gone))
        for key in gone:
            if self.store.find("tenant-1", key) is None:
                del self.model.rows[key]

    def any_claim(self, data: st.DataObject) -> Claim | None:
        return data.draw(st.sampled_from(self.model.claims)) if self.model.claims else None

    def any_seen(self, data: st.DataObject) -> Stored | None:
        return data.draw(st.sampled_from(self.model.seen)) if self.model.seen else None

    @invariant()
    def every_key_is_as_the_model_says(self) -> None:
        for key in KEYS:
            found, row = self.store.find("tenant-1", key), self.model.rows.get(key)
            assert (found is None) == (row is None)
            if found is not None and row is not None:
                self.check(found, row)


def test_the_store_is_as_its_model(store: SQLAlchemyStore) -> None:
    """Random requests, steps, records, holds, settlements and waits never tell the store from its model."""
    machine: Any = type("Machine", (Machine,), {"store": store})
    quick = settings(max_examples=15, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=quick)
