"""Promises of a store that can be looked over: figures, counts, tallies, lists, one key in full, and erasure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Protocol

from ..claim import Claim, Status
from ..recorded import Elsewhere, Recorded
from ..store.base import Deleted, Store
from ..store.survey import Counted, Counts, Filters, Survey, Tally
from .asking import ANSWER, Shifting, ask, claimed, stored
from .steps import STEPS, lost, retaken

AGES = (60.0, 3_600.0, 86_400.0, 604_800.0)


class Surveyed(Store, Survey, Protocol):
    """A store with all of it."""


def keys(store: Survey, limit: int = 100, **filters: object) -> list[str]:
    """The keys that are listed."""
    return [one.key for one in store.listed(Filters(**filters), limit)]  # type: ignore[arg-type]


def added(tallies: Iterable[Tally]) -> dict[tuple[str | None, ...], tuple[int, int]]:
    """The keys and the retried keys of each scope, or method and path."""
    sums: dict[tuple[str | None, ...], tuple[int, int]] = {}
    for one in tallies:
        group = (one.scope, one.method, one.path)
        before = sums.get(group, (0, 0))
        sums[group] = (before[0] + one.keys, before[1] + one.retried)
    return sums


def seconds(moment: datetime | None, other: datetime | None) -> float:
    """How long after another one a moment is."""
    assert moment is not None
    assert other is not None
    assert moment.utcoffset() == other.utcoffset() == timedelta(0), "a time is not in UTC"
    return (moment - other).total_seconds()


class Surveys(Shifting):
    """What people see of the stored keys, and how those of a scope are erased."""

    # Figures

    def test_an_empty_store(self, store: Surveyed) -> None:
        """Of nothing every figure is zero, and nothing is listed, found or erased."""
        stats = store.stats()
        assert stats.by_status == dict.fromkeys(Status, 0)
        assert (stats.stale, stats.expired, stats.unknown, stats.oldest) == (0, 0, 0, None)
        assert list(stats.by_age) == [(age, 0) for age in (*AGES, None)]
        assert stats.counts == Counts()
        assert [list(store.tally(by)) for by in ("scope", "path")] == [[], []]
        assert list(store.listed(Filters(), 10)) == []
        assert store.detail("tenant-1", "key-00000001") is None
        assert store.erase("tenant-1", 10) == Deleted(0)

    def test_figures_by_status(self, store: Surveyed) -> None:
        """Each status is counted, those past their lease and what may be pruned with them."""
        store.record(claimed(store, ask(key="old", retention=10)), ANSWER, 10)
        store.record(claimed(store, ask(key="recorded")), ANSWER, 3600)
        store.hold(claimed(store, ask(key="held", retention=10)))
        claimed(store, ask(key="crashed", retention=10))
        claimed(store, ask(key="rejected", retention=10, stale_policy="reject"))
        released = claimed(store, ask(key="released"))
        store.keep_steps(released, STEPS)
        store.release(released)
        self.shift(store, 40)
        claimed(store, ask(key="live", retention=0.001))
        stats = store.stats()
        states = (Status.IN_PROGRESS, Status.COMPLETED, Status.HELD, Status.RELEASED)
        assert [stats.by_status[status] for status in states] == [3, 2, 1, 1]
        assert (stats.stale, stats.unknown) == (2, 0)
        assert stats.expired == store.prunable() == 2
        assert stats.bytes is None or stats.bytes > 0

    def test_figures_by_age(self, store: Surveyed) -> None:
        """A key is counted in one age, by when it was stored, whatever was done to it since."""
        claims = []
        for number, pause in enumerate((600_000, 92_800, 6_600, 600, 0)):
            claims.append(claimed(store, ask(key=f"key-{number}", retention=10**6)))
            self.shift(store, pause)
        store.renew(claims)
        stats = store.stats()
        assert list(stats.by_age) == [(60.0, 1), (3_600.0, 1), (86_400.0, 1), (604_800.0, 1), (None, 1)]
        oldest = store.detail("tenant-1", "key-0")
        assert oldest is not None
        assert stats.oldest == oldest.summary.created_at

    def test_tallies(self, store: Surveyed) -> None:
        """The keys of a scope, or of a method and path, add up, and so do those that were asked for again."""
        claimed(store, ask(key="crashed"))
        self.shift(store, 31)
        retaken(store, ask(key="crashed"))
        claimed(store, ask(key="first", path="/Charges"))
        claimed(store, ask(scope="Tenant-1"))
        claimed(store, ask(scope="tenant-2", method="PATCH"))
        by_scope = {"tenant-1": (2, 1), "Tenant-1": (1, 0), "tenant-2": (1, 0)}
        assert added(store.tally("scope")) == {(scope, None, None): found for scope, found in by_scope.items()}
        by_path = {("POST", "/charges"): (2, 1), ("POST", "/Charges"): (1, 0), ("PATCH", "/charges"): (1, 0)}
        assert added(store.tally("path")) == {(None, *group): found for group, found in by_path.items()}
        for by in ("key", "", "SCOPE"):
            try:
                store.tally(by)
            except ValueError:
                continue
            raise AssertionError(f"keys were tallied by {by!r}")

    def test_counts(self, store: Surveyed) -> None:
        """What happened to keys is added to their counts; of a key that is gone nothing is counted."""
        for number in range(3):
            claimed(store, ask(key=f"key-{number}", scope=f"tenant-{number % 2}"))
        once, twice = Counts(3, 2, 1, early=2, late=1), Counts(6, 4, 2, early=4, late=2)
        store.count([Counted("tenant-0", "key-0", once), Counted("tenant-1", "key-1", Counts(conflicts=1))])
        store.count([Counted("tenant-1", "key-0", once), Counted("tenant-0", "key-0", once)])
        assert [one.counts for one in store.listed(Filters(), 9)] == [Counts(), Counts(conflicts=1), twice]
        assert store.stats().counts == replace(twice, conflicts=5)
        assert added(store.tally("scope")) == {("tenant-0", None, None): (2, 1), ("tenant-1", None, None): (1, 1)}
        assert {one.counts for one in store.tally("scope")} == {twice, Counts(conflicts=1)}

    def test_kept_keys(self, store: Surveyed) -> None:
        """Of a scope those keys are kept that are not new again yet; the first that ends tells when there is room."""
        assert isinstance(store, Survey)
        assert store.kept("tenant-1", 10).count == 0
        for number, retention in enumerate((3600.0, 60.0, 600.0)):
            store.record(claimed(store, ask(key=f"key-{number}")), ANSWER, retention)
        claimed(store, ask(scope="tenant-2"))
        kept = store.kept("tenant-1", 10)
        assert kept.count == 3
        assert 50 < kept.first_ends_in <= 60
        assert store.kept("tenant-1", 2).count == 2
        self.shift(store, 61)
        kept = store.kept("tenant-1", 10)
        assert kept.count == 2
        assert 530 < kept.first_ends_in < 540

    # The list

    def test_a_list_goes_on(self, store: Surveyed) -> None:
        """Keys are listed as they were stored, the last one first, so many at a time."""
        for number in range(5):
            claimed(store, ask(key=f"key-{number}"))
        assert keys(store) == ["key-4", "key-3", "key-2", "key-1", "key-0"]
        first = store.listed(Filters(), 2)
        assert [one.key for one in first] == ["key-4", "key-3"]
        claimed(store, ask(key="key-5"))
        rest = store.listed(Filters(), 2, before=first[-1].id)
        assert [one.key for one in rest] == ["key-2", "key-1"]
        assert [one.key for one in store.listed(Filters(), 2, before=rest[-1].id)] == ["key-0"]
        assert keys(store, 0) == []

    def test_what_is_listed(self, store: Surveyed) -> None:
        """All that a filter names has to be so, and what it leaves out does not count."""
        store.hold(claimed(store, ask(key="ch_1", path="/charges/1")))
        claimed(store, ask(key="ch_2", scope="tenant-2", stale_policy="reject"))
        claimed(store, ask(key="re_1", path="/refunds"))
        self.shift(store, 31)
        claimed(store, ask(key="re_2", path="/refunds/2"))
        assert keys(store, scope="tenant-2") == ["ch_2"]
        assert keys(store, status=Status.IN_PROGRESS) == ["re_2", "re_1", "ch_2"]
        assert keys(store, key="ch_") == ["ch_2", "ch_1"]
        assert keys(store, path="/refunds") == ["re_2", "re_1"]
        assert keys(store, stale=True) == ["re_1", "ch_2"]
        assert keys(store, 1, stale=True) == ["re_1"]
        assert keys(store, stale=True, path="/re", key="re", scope="tenant-1", status=Status.IN_PROGRESS) == ["re_1"]
        assert keys(store, stale=True, status=Status.HELD) == keys(store, key="_1") == keys(store, scope="tenant") == []

    def test_filters_are_exact(self, store: Surveyed) -> None:
        """Case and accents count, and no character stands for others."""
        texts = ["100%", "100x", "a_b", "a%b", "A_b", "a/b", "a\\b", "\u00e9t\u00e9", "\u00c9t\u00e9", "'"]
        for text in texts:
            claimed(store, ask(key=text, scope=text, path=text))
        for text in texts:
            assert keys(store, scope=text) == keys(store, key=text) == keys(store, path=text) == [text]
        for text in ("\0", "\ud800", "s" * 256):
            assert keys(store, scope=text) == keys(store, key=text) == []
            assert store.detail(text, "key") is store.detail("scope", text) is None
            assert store.erase(text, 10) == Deleted(0)

    def test_a_line_of_the_list(self, store: Surveyed) -> None:
        """It has what is stored, with the times of what happened, and the store's own judgements of them."""
        claim = claimed(store, ask(method="PATCH", path="/charges/1", lock_timeout=60.5, stale_policy="reject"))
        self.shift(store, 100)
        (one,) = store.listed(Filters(), 10)
        assert (one.scope, one.key, one.status, one.problem) == (claim.scope, claim.key, Status.IN_PROGRESS, None)
        assert (one.method, one.path, one.attempts, one.response_status) == ("PATCH", "/charges/1", 1, None)
        assert (one.stale, one.expired, one.stale_policy, one.lock_timeout) == (True, False, "reject", 60.5)
        assert (one.completed_at, one.counts) == (None, Counts())
        store.renew([claim])
        store.record(claim, ANSWER, 3600)
        self.shift(store, 3601)
        (one,) = store.listed(Filters(), 10)
        assert (one.status, one.response_status, one.stale, one.expired) == (Status.COMPLETED, 201, False, True)
        assert 99 < seconds(one.locked_at, one.created_at) < 110
        assert 0 <= seconds(one.completed_at, one.locked_at) < 10
        assert 0 <= seconds(one.updated_at, one.locked_at) < 10
        assert 3599 < seconds(one.expires_at, one.completed_at) < 3601
        assert 3600 < seconds(datetime.now(timezone.utc), one.updated_at) < 3700

    # One key

    def test_one_key_in_full(self, store: Surveyed) -> None:
        """Its answer, steps and secret are there as they were stored, and it stays as it is."""
        asking = ask(fingerprint="f" * 64, fingerprint_version=7)
        claim = claimed(store, asking)
        found = store.detail(claim.scope, claim.key)
        assert found is not None
        assert (found.fingerprint, found.fingerprint_version) == ("f" * 64, 7)
        assert (dict(found.steps), found.secret_id, found.recorded) == ({}, None, None)
        store.keep_steps(claim, STEPS)
        store.note_secret(claim, "secret-1")
        store.record(claim, ANSWER, 3600)
        self.shift(store, 3601)
        found = store.detail(claim.scope, claim.key)
        assert found is not None
        assert (dict(found.steps), found.secret_id, found.recorded) == (STEPS, "secret-1", ANSWER)
        assert [found.summary] == list(store.listed(Filters(), 10))
        assert store.detail("tenant-2", claim.key) is store.detail(claim.scope, claim.key + "x") is None

    def test_answers_of_any_kind(self, store: Surveyed) -> None:
        """A body that lies elsewhere, bytes of any kind, and an answer that was not kept are told apart."""
        headers = (("Link", "<1>"), ("X-B", ""), ("Link", "<2>"))
        answers = [
            Recorded(201, headers, bytes(range(256)), "Made It"),
            Recorded(200, headers, Elsewhere("0123-01.body", 2**40, "0" * 64)),
            Recorded(204, (), b""),
            Recorded(201),
        ]
        for number, answer in enumerate(answers):
            store.record(claimed(store, ask(key=f"key-{number}")), answer, 3600)
            found = store.detail("tenant-1", f"key-{number}")
            assert found is not None
            assert found.recorded == answer

    # Erasure

    def test_a_scope_is_erased(self, store: Surveyed) -> None:
        """All keys of a scope go, whatever their status, and no other scope's."""
        claims = [claimed(store, ask(key=f"key-{number}")) for number in range(5)]
        store.record(claims[0], ANSWER, 3600)
        store.hold(claims[1])
        store.keep_steps(claims[2], STEPS)
        store.release(claims[2])
        others = [claimed(store, ask(scope=scope)) for scope in ("tenant-10", "Tenant-1", "tenant-2")]
        assert [store.erase("tenant-1", 2).count for _ in range(4)] == [2, 2, 1, 0]
        assert keys(store, scope="tenant-1") == []
        for other in others:
            assert stored(store, ask(scope=other.scope)).token == other.token

    def test_one_key_is_erased(self, store: Surveyed) -> None:
        """One key goes, with the name of its body, and no other of its scope; one that is not there is none."""
        large = replace(ANSWER, body=Elsewhere("body-1", 10, "0" * 64))
        store.record(claimed(store, ask(key="key-1")), large, 3600)
        others = [claimed(store, ask(key=key)) for key in ("key-10", "Key-1", "key-2")]
        assert store.erase("tenant-1", 10, key="key-3") == Deleted(0)
        assert store.erase("tenant-2", 10, key="key-1") == Deleted(0)
        assert store.erase("tenant-1", 10, True, "key-1") == Deleted(1, ("body-1",))
        assert store.erase("tenant-1", 10, key="key-2") == Deleted(1)
        assert sorted(keys(store)) == sorted(other.key for other in others[:2])

    def test_an_erased_claim_is_lost(self, store: Surveyed) -> None:
        """A holder whose claim is erased has no rights left, and the key is new."""
        claim = claimed(store, ask())
        assert store.erase(claim.scope, 10).count == 1
        assert lost(store, claim)
        assert isinstance(store.claim(ask()), Claim)

    def test_bodies_of_erased_keys(self, store: Surveyed) -> None:
        """Where it is asked for, the bodies that lie elsewhere are named, of each batch its own."""
        for number in range(3):
            large = replace(ANSWER, body=Elsewhere(f"body-{number}", 10, "0" * 64))
            store.record(claimed(store, ask(key=f"large-{number}")), large, 3600)
            store.record(claimed(store, ask(key=f"small-{number}")), ANSWER, 3600)
            store.record(claimed(store, ask(key=f"none-{number}")), Recorded(201), 3600)
        large = replace(ANSWER, body=Elsewhere("body-4", 10, "0" * 64))
        store.record(claimed(store, ask(scope="tenant-2")), large, 3600)
        batches = [store.erase("tenant-1", 5, bodies=True) for _ in range(2)]
        assert [batch.count for batch in batches] == [5, 4]
        assert sorted(name for batch in batches for name in batch.bodies) == ["body-0", "body-1", "body-2"]
        assert store.erase("tenant-2", 5) == Deleted(1)
