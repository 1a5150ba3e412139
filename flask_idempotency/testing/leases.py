"""Promises of a store: the lease, the takeover, retention and pruning."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from ..claim import Status
from ..recorded import Elsewhere, Recorded
from ..store.base import Store
from .asking import ANSWER, Shifting, ask, claimed, race, stored


class Leases(Shifting):
    """What time does to a key."""

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
            assert store.prune(10).count == 0

    # Retention

    def test_a_live_claim_never_expires(self, store: Store) -> None:
        """A claim that is renewed outlives its retention, and so does its record."""
        claim = claimed(store, ask(retention=1.0))
        self.shift(store, 3)
        found = stored(store, ask())
        assert (found.stale, found.expired) == (False, False)
        assert store.take(ask(), found) is None
        assert (store.prunable(), store.prune(10).count) == (0, 0)
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

    # Bodies elsewhere

    def test_pruning_tells_of_bodies_elsewhere(self, store: Store) -> None:
        """Asked to, pruning names the bodies that the deleted keys had elsewhere, each once, and no others."""
        for number in range(3):
            body = Elsewhere(f"body-{number}", 10, "0" * 64)
            store.record(claimed(store, ask(key=f"large-{number}")), replace(ANSWER, body=body), 60)
            store.record(claimed(store, ask(key=f"small-{number}")), ANSWER, 60)
            store.record(claimed(store, ask(key=f"none-{number}")), ANSWER.without_answer(), 60)
        self.shift(store, 61)
        store.record(claimed(store, ask()), replace(ANSWER, body=Elsewhere("kept", 10, "0" * 64)), 60)
        batches = [store.prune(4, bodies=True) for _ in range(4)]
        assert [batch.count for batch in batches] == [4, 4, 1, 0]
        assert sorted(name for batch in batches for name in batch.bodies) == ["body-0", "body-1", "body-2"]

    def test_tokens_in_use(self, store: Store) -> None:
        """The tokens of all keys that may need a body: claims, held and released keys, and records with one elsewhere.

        Not those of other records, nor of claims that were taken over.
        """
        elsewhere = replace(ANSWER, body=Elsewhere("large", 10, "0" * 64))
        assert list(store.tokens_in_use()) == []
        small, large, none, held, released, running = (claimed(store, ask(key=f"key-{number}")) for number in range(6))
        store.record(small, ANSWER, 60)
        store.record(large, elsewhere, 60)
        store.record(none, ANSWER.without_answer(), 60)
        store.hold(held)
        store.keep_steps(released, {"step": "1"})
        store.release(released)
        assert sorted(store.tokens_in_use()) == sorted(one.token for one in (large, held, released, running))
        self.shift(store, 31)
        new = store.take(ask(key=running.key), stored(store, ask(key=running.key)))
        assert new is not None
        assert sorted(store.tokens_in_use()) == sorted(one.token for one in (large, held, released, new))

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
        assert [store.prune(4).count, store.prune(4).count, store.prune(4).count] == [4, 2, 0]
        assert store.prunable() == 0
        assert store.find("tenant-1", "kept") is not None
        assert store.find("tenant-1", "live") is not None
        assert store.find("tenant-1", "crashed") is None
        claimed(store, ask(key="old-0"))
