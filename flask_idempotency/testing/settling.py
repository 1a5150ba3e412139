"""Promises of a store: how a key is settled by people or code."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..claim import Asking, Claim, Status, Stored
from ..store.base import Store
from .asking import ANSWER, RIVALS, Shifting, ask, claimed, race, stored
from .steps import DAY, LATE, STEPS, again, lost, retaken, token


def unchanged(store: Store, seen: Stored, force: bool = False) -> bool:
    """Whether a key can neither be settled nor freed as it was seen."""
    settled = store.settle(seen, LATE, DAY, token(), force)
    return not settled and not store.free(seen, DAY, token(), force)


class Settling(Shifting):
    """What people or code do with a key that nobody works on."""

    def left(self, store: Store, asking: Asking, state: str, steps: bool = False) -> tuple[Claim, Stored]:
        """A key in one of the states in which it can be met, and how it was seen."""
        claim = claimed(store, asking)
        if steps or state == "released":
            assert store.keep_steps(claim, STEPS)
            assert store.note_secret(claim, "secret-1") == "secret-1"
        if state == "held":
            assert store.hold(claim)
        elif state == "released":
            assert store.release(claim)
        elif state == "completed":
            assert store.record(claim, LATE, DAY)
        elif state == "stale":
            self.shift(store, 31)
        return claim, stored(store, asking)

    # Settling

    def test_a_key_that_nobody_works_on_is_settled(self, store: Store) -> None:
        """An answer is recorded for it, and kept for the time given; its old holder has no rights left."""
        for state, policy in itertools.product(("held", "stale", "released"), ("reexecute", "reject")):
            asking = ask(key=f"{state}-{policy}", stale_policy=policy)
            claim, seen = self.left(store, asking, state)
            new = token()
            assert store.settle(seen, ANSWER, 100, new)
            found = stored(store, asking)
            assert (found.status, found.recorded, found.token) == (Status.COMPLETED, ANSWER, new)
            assert found.age_seconds < 5
            assert lost(store, claim)
            assert not store.hold(claim)
            assert stored(store, asking).recorded == ANSWER
            self.shift(store, 90)
            assert not stored(store, asking).expired
            self.shift(store, 11)
            assert stored(store, asking).expired

    def test_settling_by_force(self, store: Store) -> None:
        """By force an answer is recorded over a live claim, too, whose holder then records nothing over it."""
        for state in ("alive", "held", "stale", "released"):
            asking = ask(key=state)
            claim, seen = self.left(store, asking, state)
            assert store.settle(seen, ANSWER, DAY, token(), force=True)
            assert lost(store, claim)
            assert stored(store, asking).recorded == ANSWER

    def test_what_is_not_settled(self, store: Store) -> None:
        """A live claim is left alone without force, and a record stays with force and without."""
        claim, seen = self.left(store, ask(), "alive")
        assert not store.settle(seen, LATE, DAY, token())
        assert store.record(claim, ANSWER, DAY)
        seen = stored(store, ask())
        assert not store.settle(seen, LATE, DAY, token())
        assert not store.settle(seen, LATE, DAY, token(), force=True)
        assert stored(store, ask()).recorded == ANSWER

    # Freeing

    def test_a_key_that_nobody_works_on_is_freed(self, store: Store) -> None:
        """It is new again, for any request, and its old holder has no rights left."""
        for state, policy in itertools.product(("held", "stale"), ("reexecute", "reject")):
            asking = ask(key=f"{state}-{policy}", stale_policy=policy)
            claim, seen = self.left(store, asking, state)
            assert store.free(seen, DAY, token())
            assert lost(store, claim)
            assert claimed(store, again(asking, fingerprint="f" * 64)).attempts == 1

    def test_freeing_by_force(self, store: Store) -> None:
        """A live claim, and a record, are freed by force alone; the live holder then changes nothing any more."""
        for state in ("alive", "completed"):
            claim, seen = self.left(store, ask(), state)
            assert not store.free(seen, DAY, token())
            assert stored(store, ask()).token == claim.token
            assert store.free(seen, DAY, token(), force=True)
            assert lost(store, claim)
            assert store.find("tenant-1", "key-00000001") is None

    def test_a_key_with_steps_is_freed(self, store: Store) -> None:
        """It goes at once to a retry of the same request, which finds the steps, and to no other."""
        for state, force in itertools.product(("alive", "held", "stale", "completed"), (False, True)):
            if force or state in ("held", "stale"):
                self.check_freed(store, state, force)

    def check_freed(self, store: Store, state: str, force: bool) -> None:
        """One key with steps that is freed, and taken by a retry."""
        asking, new = ask(key=f"{state}-{force}"), token()
        claim, seen = self.left(store, asking, state, steps=True)
        assert store.free(seen, DAY, new, force)
        found = stored(store, asking)
        assert (found.status, found.token, found.recorded, found.attempts) == (Status.RELEASED, new, None, 1)
        assert found.age_seconds < 5
        assert lost(store, claim)
        assert store.take(again(asking, fingerprint="f" * 64), found) is None
        retry = retaken(store, asking)
        assert (retry.attempts, store.resume(retry)) == (2, STEPS)
        assert store.note_secret(retry, "secret-2") == "secret-1"

    def test_a_key_with_steps_in_use_is_not_freed(self, store: Store) -> None:
        """Without force a live claim, or a record, stays as it is."""
        for state in ("alive", "completed"):
            _, seen = self.left(store, ask(key=state), state, steps=True)
            assert not store.free(seen, DAY, token())
            found = stored(store, ask(key=state))
            assert (found.status, found.token, found.recorded) == (seen.status, seen.token, seen.recorded)

    def test_a_key_freed_late_keeps_its_steps(self, store: Store) -> None:
        """A key that waited for longer than its retention is kept for another one, and then pruned."""
        _, seen = self.left(store, ask(), "held", steps=True)
        self.shift(store, DAY * 7)
        assert store.free(seen, 100, token())
        found = stored(store, ask())
        assert (found.status, found.expired) == (Status.RELEASED, False)
        self.shift(store, 90)
        assert store.prune(10).count == 0
        self.shift(store, 11)
        assert store.prune(10).count == 1

    def test_a_released_key_is_free_already(self, store: Store) -> None:
        """There is nothing to do for a key that was released, with force or without, and its steps stay."""
        _, seen = self.left(store, ask(), "released")
        assert not store.free(seen, DAY, token())
        assert not store.free(seen, DAY, token(), force=True)
        assert store.resume(retaken(store, ask())) == STEPS

    # Who was quicker

    def test_what_has_changed_is_left_alone(self, store: Store) -> None:
        """A key that was renewed, taken over, recorded or released since it was seen is as that has left it."""
        for steps, force in itertools.product((False, True), (False, True)):
            asking = ask(key=f"{steps}-{force}")
            claim, seen = self.left(store, asking, "stale", steps)
            store.renew([claim])
            assert unchanged(store, seen)
            self.shift(store, 31)
            new = retaken(store, asking)
            assert unchanged(store, seen, force)
            seen = stored(store, asking)
            assert store.record(new, ANSWER, DAY)
            assert unchanged(store, seen, force)
            assert stored(store, asking).recorded == ANSWER
            assert unchanged(store, replace(seen, key="key-that-is-not-there"), force)
            assert unchanged(store, replace(seen, scope="tenant-2"), force)

    def test_what_was_released_since_is_left_alone(self, store: Store) -> None:
        """A claim that was seen in progress, and is released by now, waits for its retry."""
        for force in (False, True):
            asking = ask(key=f"{force}")
            claim, seen = self.left(store, asking, "stale", steps=True)
            assert store.release(claim)
            assert unchanged(store, seen, force)
            assert store.resume(retaken(store, asking)) == STEPS

    def test_one_of_many_settles(self, store: Store) -> None:
        """Of those who settle or free what they saw at once, exactly one does, and the key is as that one left it."""
        for state, steps, force in itertools.product(("held", "stale"), (False, True), (False, True)):
            asking = ask(key=f"{state}-{steps}-{force}")
            _, seen = self.left(store, asking, state, steps)
            winner, new = rivals(store, seen, force)
            found = store.find(asking.scope, asking.key)
            if winner % 2 and not steps:
                assert found is None
            else:
                assert found is not None
                assert found.token == new
                assert found.recorded == (None if winner % 2 else replace(ANSWER, body=str(winner).encode()))

    def test_freeing_meets_the_holders_record(self, store: Store) -> None:
        """Where a key is freed while its holder records, exactly one of both is done, and the other is told so."""
        for steps, force, turn in itertools.product((False, True), (False, True), range(3)):
            asking = ask(key=f"{steps}-{force}-{turn}")
            claim, seen = self.left(store, asking, "alive" if force else "stale", steps)
            recorded, freed = record_or_free(store, claim, seen, force)
            assert recorded != freed
            found = store.find(asking.scope, asking.key)
            assert (found.recorded if found else None) == (ANSWER if recorded else None)


def rivals(store: Store, seen: Stored, force: bool) -> tuple[int, str]:
    """Settle a key and free it, both several times at once; returns who did it, and with which token.

    Those with an even number settle, each with an answer of its own; the others free.
    """
    tokens = [token() for _ in range(RIVALS)]

    def one(number: int) -> bool:
        if number % 2:
            return store.free(seen, DAY, tokens[number], force)
        return store.settle(seen, replace(ANSWER, body=str(number).encode()), DAY, tokens[number], force)

    done = race(one)
    assert done.count(True) == 1, f"{done.count(True)} were told that they did it"
    return done.index(True), tokens[done.index(True)]


def record_or_free(store: Store, claim: Claim, seen: Stored, force: bool) -> tuple[bool, bool]:
    """Record and free at once; returns which of both was done."""

    def one(number: int) -> bool:
        return store.free(seen, DAY, token(), force) if number else store.record(claim, ANSWER, DAY)

    recorded, freed = race(one, 2)
    return recorded, freed
