"""Promises of a store: steps and the secret's id, and keys that are released with them, or held."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from ..claim import Asking, Claim, Status
from ..recorded import Recorded
from ..store.base import Store
from .asking import ANSWER, Shifting, ask, claimed, race, stored

#: Results as a view would have them stored: JSON, in which every character counts.
STEPS = {"charge": '{"b": 1.10, "a": 10000000000000000000001}', "mail ✉": '"\\u0000\\ud83d"', "none": "null", "": "1"}
LATE = Recorded(500, (), b"late")
DAY = 86400.0


def token() -> str:
    """A new fencing token."""
    return secrets.token_hex(16)


def again(asking: Asking, **changes: Any) -> Asking:
    """The same request once more, with a token of its own; any field can be changed."""
    return replace(asking, **{"token": token(), **changes})


def lost(store: Store, claim: Claim) -> bool:
    """Whether a claim gives its holder no rights at all."""
    refused = (
        not store.record(claim, LATE, DAY),
        not store.release(claim),
        store.resume(claim) is None,
        not store.keep_steps(claim, {"late": "1"}),
        store.note_secret(claim, "late") is None,
        store.renew([claim]) == set(),
    )
    assert len(set(refused)) == 1, f"some of the rights are left: {refused}"
    return all(refused)


def retaken(store: Store, asking: Asking) -> Claim:
    """The claim of a retry, which is granted over what is there."""
    claim = store.take(again(asking), stored(store, asking))
    assert claim is not None, "the retry did not get the claim"
    return claim


class Steps(Shifting):
    """What a claim's holder leaves behind."""

    def test_steps_come_back_as_they_were(self, store: Store) -> None:
        """The results stored last are there, to the character; before any was stored there are none."""
        claim = claimed(store, ask())
        assert store.resume(claim) == {}
        assert store.keep_steps(claim, {"gone": "1"})
        assert store.keep_steps(claim, STEPS)
        assert store.resume(claim) == STEPS
        assert store.keep_steps(claim, {})
        assert store.resume(claim) == {}

    def test_steps_are_signs_of_life(self, store: Store) -> None:
        """Each call of a step begins the lease anew."""
        claim = claimed(store, ask())
        calls = (
            lambda: store.resume(claim),
            lambda: store.keep_steps(claim, STEPS),
            lambda: store.note_secret(claim, "secret-1"),
        )
        for call in calls:
            self.shift(store, 25)
            call()
            assert stored(store, ask()).age_seconds < 20

    def test_the_first_secret_stays(self, store: Store) -> None:
        """The secret that was noted first is the key's, also for attempts after a takeover."""
        claim = claimed(store, ask())
        assert store.note_secret(claim, "secret-1") == "secret-1"
        assert store.note_secret(claim, "secret-2") == "secret-1"
        self.shift(store, 31)
        assert store.note_secret(retaken(store, ask()), "secret-3") == "secret-1"

    def test_a_takeover_goes_on_with_the_steps(self, store: Store) -> None:
        """Who takes over finds the results of the attempt before, and the old holder changes nothing any more."""
        old = claimed(store, ask())
        store.keep_steps(old, STEPS)
        self.shift(store, 31)
        new = retaken(store, ask())
        assert lost(store, old)
        assert (new.attempts, store.resume(new)) == (2, STEPS)

    def test_steps_end_with_their_key(self, store: Store) -> None:
        """A key past its retention begins without steps and without a secret."""
        claim = claimed(store, ask())
        store.keep_steps(claim, STEPS)
        store.note_secret(claim, "secret-1")
        store.record(claim, ANSWER, 60)
        assert (store.resume(claim), store.note_secret(claim, "late")) == (None, None)
        assert not store.keep_steps(claim, {"late": "1"})
        self.shift(store, 61)
        new = retaken(store, ask())
        assert (new.attempts, store.resume(new), store.note_secret(new, "secret-2")) == (1, {}, "secret-2")

    # The release

    def test_a_release_keeps_what_the_next_attempt_needs(self, store: Store) -> None:
        """A key with steps or a secret goes at once to a retry of the same request, and to no other."""
        for kept in ("steps", "secret", "both"):
            self.check_kept(store, kept, ask(key=f"key-{kept}"))

    def check_kept(self, store: Store, kept: str, asking: Asking) -> None:
        """One key that is released, and taken by one of many retries."""
        first = claimed(store, asking)
        if kept != "secret":
            store.keep_steps(first, STEPS)
        if kept != "steps":
            store.note_secret(first, "secret-1")
        self.shift(store, 10)
        assert store.release(first)
        found = stored(store, asking)
        assert (found.status, found.attempts, found.stale, found.expired) == (Status.RELEASED, 1, False, False)
        assert (found.token, found.recorded) == (first.token, None)
        assert found.age_seconds < 5
        assert lost(store, first)
        assert store.take(again(asking, fingerprint="f" * 64), found) is None
        taken = [claim for claim in race(lambda _: store.take(again(asking), found)) if claim is not None]
        assert len(taken) == 1
        assert (taken[0].attempts, store.resume(taken[0])) == (2, {} if kept == "secret" else STEPS)
        assert store.note_secret(taken[0], "secret-2") == ("secret-2" if kept == "steps" else "secret-1")

    def test_a_released_key_ends_with_its_retention(self, store: Store) -> None:
        """A key that was released with its steps is new after its retention, and is pruned."""
        claim = claimed(store, ask(retention=60.0))
        store.keep_steps(claim, STEPS)
        store.release(claim)
        assert (store.prunable(), store.prune(10).count) == (0, 0)
        self.shift(store, 61)
        assert stored(store, ask()).expired
        assert (store.prunable(), store.prune(10).count) == (1, 1)
        assert store.find("tenant-1", "key-00000001") is None

    # The hold

    def test_a_held_key_waits(self, store: Store) -> None:
        """A held key is never stale, taken, expired or pruned, and its holder has no rights but to say it again."""
        claim = claimed(store, ask(retention=60.0))
        self.shift(store, 10)
        assert store.hold(claim)
        assert store.hold(claim)
        assert stored(store, ask()).age_seconds < 5
        assert lost(store, claim)
        for seconds in (61, DAY * 400):
            self.shift(store, seconds)
            found = stored(store, ask())
            assert (found.status, found.stale, found.expired, found.recorded) == (Status.HELD, False, False, None)
            assert store.take(ask(), found) is None
            assert (store.prunable(), store.prune(10).count) == (0, 0)

    def test_only_the_holder_holds(self, store: Store) -> None:
        """Neither a claim that was taken over nor one that was recorded can be held."""
        old = claimed(store, ask())
        self.shift(store, 31)
        new = retaken(store, ask())
        assert not store.hold(old)
        store.record(new, ANSWER, DAY)
        assert not store.hold(new)
        assert stored(store, ask()).recorded == ANSWER
