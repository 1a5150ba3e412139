"""Promises of a store: the claim, the look-up and the record."""

from __future__ import annotations

import secrets

from ..claim import Claim, Status
from ..recorded import Elsewhere, Recorded
from ..store.base import Store
from .asking import ANSWER, Shifting, ask, claimed, race, stored


class Claims(Shifting):
    """Who gets a claim, and what becomes of it."""

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
        assert 9 < stored(store, ask()).age_seconds < 20
        store.renew([claim])
        assert stored(store, ask()).age_seconds < 5
        store.record(claim, ANSWER, 3600)
        self.shift(store, 100)
        assert 99 < stored(store, ask()).age_seconds < 110

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

    def test_a_body_that_lies_elsewhere(self, store: Store) -> None:
        """Of a body that is not in the store, its name, size and digest come back as they were, with all headers."""
        body = Elsewhere("0123456789abcdef-01.body", 2**40, "0" * 63 + "f")
        headers = (("Content-Type", "text/csv"), ("Link", "<1>"), ("Link", "<2>"))
        answers = [Recorded(201, headers, body, "Made It"), Recorded(200, (), body)]
        for number, answer in enumerate(answers):
            asking = ask(key=f"key-{number}")
            assert store.record(claimed(store, asking), answer, 3600)
            found = stored(store, asking)
            assert (found.status, found.recorded) == (Status.COMPLETED, answer)
        seen = stored(store, ask(key="key-0"))
        assert store.free(seen, 3600, secrets.token_hex(16), force=True)
        assert store.find("tenant-1", "key-0") is None

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
