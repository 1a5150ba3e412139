"""For tests: every promise of a store, as tests that run over any store.

A store of your own is put to the proof by a subclass in your test suite (pytest)::

    import pytest
    from flask_idempotency.testing import StoreConformance

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore(...)          # empty

        def shift(self, store, seconds):
            store.move_all_times_into_the_past(seconds)

``store`` is a fixture that gives an empty store to each test, one that may be called from many threads.
``shift`` makes everything stored older by so many seconds, so that no test has to wait for a lease.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from .claim import Asking, Claim, Status, Stored
from .recorded import Recorded
from .store.base import Store

T = TypeVar("T")

#: How many callers race for one key.
RIVALS = 8
ANSWER = Recorded(201, (("Content-Type", "application/json"), ("Location", "/charges/1")), b'{"id": 1}')


def ask(**changes: Any) -> Asking:
    """A request for a claim, with a token of its own; any field can be given."""
    asking = Asking(
        scope="tenant-1",
        key="key-00000001",
        method="POST",
        path="/charges",
        fingerprint="0123456789abcdef" * 4,
        fingerprint_version=1,
        token=secrets.token_hex(16),
        retention=86400.0,
        lock_timeout=30.0,
    )
    return replace(asking, **changes)


def claimed(store: Store, asking: Asking) -> Claim:
    """The claim that must be granted."""
    found = store.claim(asking)
    assert isinstance(found, Claim), f"no claim was granted, but {found} found"
    return found


def stored(store: Store, asking: Asking) -> Stored:
    """What must be there under the key, found by asking for a claim."""
    found = store.claim(replace(asking, token=secrets.token_hex(16)))
    assert isinstance(found, Stored), f"a claim was granted: {found}"
    return found


def race(function: Callable[[int], T], rivals: int = RIVALS) -> list[T]:
    """Call ``function`` in that many threads, which start at once."""
    barrier = threading.Barrier(rivals)

    def call(number: int) -> T:
        barrier.wait(10)
        return function(number)

    with ThreadPoolExecutor(rivals) as pool:
        return list(pool.map(call, range(rivals)))


class StoreConformance:
    """The promises of :class:`~flask_idempotency.store.base.Store`; see the module for how to use it."""

    def shift(self, store: Any, seconds: float) -> None:
        """Make everything stored older by so many seconds."""
        raise NotImplementedError

    # The claim

    def test_only_the_first_caller_gets_the_claim(self, store: Store) -> None:
        """The first caller gets the claim, and the next one what the first has stored."""
        first = ask()
        claim = claimed(store, first)
        assert (claim.scope, claim.key, claim.token) == (first.scope, first.key, first.token)
        assert (claim.lock_timeout, claim.attempts) == (30.0, 1)
        found = stored(store, first)
        assert (found.status, found.token, found.attempts) == (Status.IN_PROGRESS, first.token, 1)
        assert (found.method, found.path, found.stale_policy) == ("POST", "/charges", "reexecute")
        assert (found.fingerprint, found.fingerprint_version) == (first.fingerprint, 1)
        assert (found.stale, found.expired, found.recorded) == (False, False, None)

    def test_one_of_many_callers_gets_the_claim(self, store: Store) -> None:
        """Of callers that start at once exactly one gets the claim, and the others see its token."""
        found = race(lambda _: store.claim(ask()))
        claims = [one for one in found if isinstance(one, Claim)]
        assert len(claims) == 1
        assert {one.token for one in found} == {claims[0].token}

    def test_a_caller_finds_its_own_claim(self, store: Store) -> None:
        """Asking again with the same token, as after a lost reply, gives the same claim."""
        asking = ask()
        assert claimed(store, asking) == claimed(store, asking)

    def test_scopes_never_meet(self, store: Store) -> None:
        """The same key in another scope is another key, wherever the boundary between the two falls."""
        claimed(store, ask(scope="u1", key="x:yyyyyyyy"))
        claimed(store, ask(scope="u1:x", key="yyyyyyyy"))
        claimed(store, ask(scope="u2", key="x:yyyyyyyy"))

    def test_keys_compare_exactly(self, store: Store) -> None:
        """Keys and scopes that differ in case, accents, blanks, or their last character alone are different."""
        texts = ["key", "KEY", "kéy", "ke\u0301y", "key ", " key", "k" * 254 + "a", "k" * 254 + "b", "../key", "%6bey"]
        for text in texts:
            claimed(store, ask(key=text))
            claimed(store, ask(scope=text, key="another"))
        for text in texts:
            assert stored(store, ask(key=text)).key == text
            assert stored(store, ask(scope=text, key="another")).scope == text

    def test_scopes_hold_any_text(self, store: Store) -> None:
        """A scope of 255 characters of any script is stored as it is."""
        for scope in ("租户" * 127 + "户", "😀" * 255, "~user:7", "a'b\"c\\d;--"):
            claimed(store, ask(scope=scope))
            assert stored(store, ask(scope=scope)).scope == scope

    # Looking

    def test_finding_claims_nothing(self, store: Store) -> None:
        """Looking a key up shows what is there, and leaves a free key free."""
        asking = ask()
        assert store.find(asking.scope, asking.key) is None
        claimed(store, asking)
        found = store.find(asking.scope, asking.key)
        assert found is not None
        assert found.token == asking.token

    def test_age_is_counted_from_the_last_event(self, store: Store) -> None:
        """The age is the time since the last sign of life, and once recorded, since the recording."""
        claim = claimed(store, ask())
        self.shift(store, 10)
        assert 10 <= stored(store, ask()).age_seconds < 20
        store.renew([claim])
        assert stored(store, ask()).age_seconds < 5
        store.record(claim, ANSWER, 3600)
        self.shift(store, 100)
        assert 100 <= stored(store, ask()).age_seconds < 110

    # The record

    def test_the_record_comes_back_as_it_was(self, store: Store) -> None:
        """Status, status text, header order and repetition, and every byte of the body survive."""
        headers = (("Link", "<1>"), ("X-B", ""), ("Link", "<2>"), ("x-b", "caf\xe9 \"quoted\" '1'"))
        answers = [
            Recorded(201, headers, bytes(range(256)), "Made It"),
            Recorded(204, (), b""),
            Recorded(200, (), b"\0" * 100_000),
            Recorded(299, headers[:1], b"null"),
        ]
        for number, answer in enumerate(answers):
            asking = ask(key=f"key-{number}")
            assert store.record(claimed(store, asking), answer, 3600)
            found = stored(store, asking)
            assert (found.status, found.recorded) == (Status.COMPLETED, answer)
            assert isinstance(found.recorded.body if found.recorded else None, bytes)

    def test_an_answer_that_was_not_kept(self, store: Store) -> None:
        """A key can be completed without its answer: then only the status is there."""
        claim = claimed(store, ask())
        assert store.record(claim, ANSWER.without_answer(), 3600)
        found = stored(store, ask())
        assert found.status is Status.COMPLETED
        assert found.recorded == Recorded(201)
        assert not found.recorded.available

    def test_recording_twice_changes_nothing(self, store: Store) -> None:
        """The recording can be repeated by the claim's holder, as after a lost reply."""
        claim = claimed(store, ask())
        assert store.record(claim, ANSWER, 3600)
        assert store.record(claim, ANSWER, 3600)
        assert stored(store, ask()).recorded == ANSWER

    def test_a_release_makes_the_key_new(self, store: Store) -> None:
        """After a release the next caller gets the claim at once, and the old holder has no rights left."""
        first = claimed(store, ask())
        assert store.release(first)
        second = claimed(store, ask(fingerprint="f" * 64))
        assert second.attempts == 1
        assert not store.release(first)
        assert not store.record(first, ANSWER, 3600)
        assert stored(store, ask()).token == second.token

    def test_a_record_can_not_be_released(self, store: Store) -> None:
        """Once recorded, the answer stays."""
        claim = claimed(store, ask())
        store.record(claim, ANSWER, 3600)
        assert not store.release(claim)
        assert stored(store, ask()).recorded == ANSWER

    # The lease

    def test_the_holders_lease_counts(self, store: Store) -> None:
        """A claim is stale once the lease that its holder stored is over, whatever lease the asker would have."""
        claimed(store, ask(lock_timeout=30.0))
        self.shift(store, 20)
        assert not stored(store, ask(lock_timeout=1.0)).stale
        self.shift(store, 11)
        assert stored(store, ask(lock_timeout=3600.0)).stale

    def test_leases_below_a_second(self, store: Store) -> None:
        """A lease of less than a second is neither rounded up nor down."""
        claimed(store, ask(lock_timeout=0.4))
        began = time.monotonic()
        found = stored(store, ask())
        # On a machine that was busy for so long, the lease may be over already.
        assert not found.stale or time.monotonic() - began > 0.2
        time.sleep(0.5)
        assert stored(store, ask()).stale

    def test_renewal_keeps_a_claim_alive(self, store: Store) -> None:
        """The lease begins anew with each sign of life."""
        claim = claimed(store, ask())
        for _ in range(3):
            self.shift(store, 25)
            assert store.renew([claim]) == {claim.token}
        assert not stored(store, ask()).stale

    def test_only_what_is_held_is_renewed(self, store: Store) -> None:
        """Renewal names the claims that still hold, and does nothing for the others."""
        assert store.renew([]) == set()
        live = claimed(store, ask(key="live"))
        recorded = claimed(store, ask(key="recorded"))
        store.record(recorded, ANSWER, 3600)
        released = claimed(store, ask(key="released"))
        store.release(released)
        other = replace(live, token=secrets.token_hex(16))
        assert store.renew([other, recorded, live, released]) == {live.token}

    def test_many_claims_are_renewed_at_once(self, store: Store) -> None:
        """Renewal takes as many claims as a process may hold."""
        claims = [claimed(store, ask(key=f"key-{number}")) for number in range(5)]
        many = [replace(claims[0], id=10**6 + number, token=secrets.token_hex(16)) for number in range(2500)]
        self.shift(store, 31)
        assert store.renew([*claims[:3], *many, *claims[3:]]) == {claim.token for claim in claims}
        assert not any(stored(store, ask(key=claim.key)).stale for claim in claims)

    # The takeover

    def test_one_of_many_callers_takes_over(self, store: Store) -> None:
        """Of callers that saw the same stale claim exactly one takes it over."""
        claimed(store, ask())
        self.shift(store, 31)
        seen = stored(store, ask())
        taken = [claim for claim in race(lambda _: store.take(ask(lock_timeout=60.0), seen)) if claim is not None]
        assert len(taken) == 1
        assert (taken[0].attempts, taken[0].lock_timeout) == (2, 60.0)
        found = stored(store, ask())
        assert (found.token, found.attempts, found.stale) == (taken[0].token, 2, False)
        self.shift(store, 45)
        assert not stored(store, ask()).stale

    def test_the_holder_of_old_is_fenced_off(self, store: Store) -> None:
        """Who was taken over can neither record, nor release, nor renew."""
        old = claimed(store, ask())
        self.shift(store, 31)
        new = store.take(ask(), stored(store, ask()))
        assert new is not None
        assert not store.record(old, ANSWER, 3600)
        assert not store.release(old)
        assert store.renew([old]) == set()
        found = stored(store, ask())
        assert (found.status, found.token) == (Status.IN_PROGRESS, new.token)
        assert store.record(new, ANSWER, 3600)
        assert not store.record(old, Recorded(500, (), b"late"), 3600)
        assert stored(store, ask()).recorded == ANSWER

    def test_a_live_claim_is_not_taken(self, store: Store) -> None:
        """What counts is the store's clock when it is asked: a claim renewed since it was seen stays."""
        claim = claimed(store, ask())
        self.shift(store, 31)
        seen = stored(store, ask())
        store.renew([claim])
        assert seen.stale
        assert store.take(ask(), seen) is None
        assert stored(store, ask()).token == claim.token

    def test_what_has_changed_is_not_taken(self, store: Store) -> None:
        """A claim that another caller took over, or that was recorded, since it was seen is not taken."""
        claim = claimed(store, ask())
        self.shift(store, 31)
        seen = stored(store, ask())
        assert store.take(ask(), seen) is not None
        self.shift(store, 31)
        assert store.take(ask(), seen) is None
        late = claimed(store, ask(key="late"))
        self.shift(store, 31)
        seen = stored(store, ask(key="late"))
        store.record(late, ANSWER, 3600)
        assert store.take(ask(key="late"), seen) is None
        assert claim.token != stored(store, ask()).token

    def test_another_request_never_takes_over(self, store: Store) -> None:
        """A stale claim goes to the same fingerprint, of the same version, only."""
        claim = claimed(store, ask())
        self.shift(store, 31)
        seen = stored(store, ask())
        assert store.take(ask(fingerprint="f" * 64), seen) is None
        assert store.take(ask(fingerprint_version=2), seen) is None
        assert stored(store, ask()).token == claim.token

    def test_stale_claims_may_wait_for_a_person(self, store: Store) -> None:
        """Under the holder's policy to reject, a stale claim is never taken over, expired or pruned."""
        claimed(store, ask(stale_policy="reject", retention=60.0))
        for seconds in (31, 3600):
            self.shift(store, seconds)
            seen = stored(store, ask())
            assert (seen.stale, seen.expired, seen.stale_policy) == (True, False, "reject")
            assert store.take(ask(), seen) is None
            assert store.prunable() == 0
            assert store.prune(10) == 0

    # Retention

    def test_a_live_claim_never_expires(self, store: Store) -> None:
        """A claim that is renewed outlives its retention, and so does its record."""
        claim = claimed(store, ask(retention=1.0))
        self.shift(store, 3)
        found = stored(store, ask())
        assert (found.stale, found.expired) == (False, False)
        assert store.take(ask(), found) is None
        assert (store.prunable(), store.prune(10)) == (0, 0)
        assert store.record(claim, ANSWER, 3600)

    def test_retention_counts_from_the_recording(self, store: Store) -> None:
        """Recording sets the retention anew, from that moment."""
        claim = claimed(store, ask(retention=100.0))
        self.shift(store, 20)
        store.record(claim, ANSWER, 50)
        self.shift(store, 40)
        assert not stored(store, ask()).expired
        self.shift(store, 11)
        assert stored(store, ask()).expired

    def test_past_its_retention_a_key_is_new(self, store: Store) -> None:
        """Exactly one caller gets an expired key, for any request, and nothing of the old one is left."""
        store.record(claimed(store, ask()), ANSWER, 60)
        self.shift(store, 61)
        seen = stored(store, ask())
        assert seen.expired
        other = ask(fingerprint="f" * 64, fingerprint_version=2, method="PATCH", path="/refunds")
        taken = race(lambda _: store.take(replace(other, token=secrets.token_hex(16)), seen))
        (claim,) = [one for one in taken if one is not None]
        found = stored(store, ask())
        assert (claim.attempts, found.attempts, found.token) == (1, 1, claim.token)
        assert (found.status, found.recorded, found.stale, found.expired) == (Status.IN_PROGRESS, None, False, False)
        assert (found.method, found.path, found.fingerprint, found.fingerprint_version) == (
            ("PATCH", "/refunds", "f" * 64, 2)
        )

    def test_a_crashed_claim_expires(self, store: Store) -> None:
        """A claim whose holder is gone is new again once both its lease and its retention are over."""
        claimed(store, ask(retention=60.0))
        self.shift(store, 31)
        assert not stored(store, ask()).expired
        self.shift(store, 30)
        seen = stored(store, ask())
        assert (seen.stale, seen.expired) == (True, True)
        claim = store.take(ask(fingerprint="f" * 64), seen)
        assert claim is not None
        assert claim.attempts == 1

    # Pruning

    def test_pruning_deletes_what_is_past_retention(self, store: Store) -> None:
        """Pruning deletes expired records and crashed claims, in batches, and nothing else."""
        for number in range(5):
            store.record(claimed(store, ask(key=f"old-{number}")), ANSWER, 60)
        claimed(store, ask(key="crashed", retention=60.0))
        self.shift(store, 61)
        store.record(claimed(store, ask(key="kept")), ANSWER, 60)
        claimed(store, ask(key="live", retention=0.001))
        assert store.prunable() == 6
        assert [store.prune(4), store.prune(4), store.prune(4)] == [4, 2, 0]
        assert store.prunable() == 0
        assert store.find("tenant-1", "kept") is not None
        assert store.find("tenant-1", "live") is not None
        assert store.find("tenant-1", "crashed") is None
        claimed(store, ask(key="old-0"))
