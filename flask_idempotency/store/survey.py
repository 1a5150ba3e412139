"""What people ask about stored keys, and what is kept for them: overviews, counts, erasure. No request needs it.

A store that has these methods beside those of :class:`~flask_idempotency.store.base.Store` serves ``flask idempotency
stats``, ``list``, ``show``, ``delete`` and ``check``, the console, ``IDEMPOTENCY_COUNT_REPLAYS`` and
``IDEMPOTENCY_MAX_LIVE_KEYS``; of one that lacks them, these say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol, runtime_checkable

from ..claim import Status
from ..recorded import Recorded
from .base import Deleted

#: Seconds. Up to the first a retry was most likely a network's hiccup; past the second the client is an aggressive one.
EARLY: Final = 5.0
LATE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Counts:
    """How often a key was asked for in vain since its claim, as far as it was counted.

    ``early`` and ``late`` are among ``replays``: those of a record younger than :data:`EARLY`, or older than
    :data:`LATE`.
    """

    replays: int = 0
    conflicts: int = 0
    mismatches: int = 0
    early: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class Counted:
    """What happened to one key since it was written down last."""

    scope: str
    key: str
    counts: Counts


@dataclass(frozen=True, slots=True)
class Filters:
    """Which keys are meant; what is left out does not count.

    :ivar scope: the whole scope, in its stored form.
    :ivar key: what the key begins with.
    :ivar path: what the path begins with.
    :ivar stale: only claims past their lease.
    """

    scope: str | None = None
    key: str | None = None
    status: Status | None = None
    path: str | None = None
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """One key in a list. Times carry the zone UTC; they, and the judgements of time, are the store's clock's.

    Of a corrupt row it has what can be read: the rest is empty, zero or ``None``, and ``problem`` says why. Without a
    ``problem`` the status and all times but ``completed_at`` are there.

    :ivar id: larger for keys that were stored later; a list goes on after it.
    :ivar stale: in progress, and its lease is over.
    :ivar expired: past its retention, and neither alive nor waiting for a person.
    """

    id: int
    scope: str
    key: str
    status: Status | None
    method: str
    path: str
    attempts: int
    stale: bool
    expired: bool
    stale_policy: str
    lock_timeout: float
    response_status: int | None
    created_at: datetime | None
    updated_at: datetime | None
    locked_at: datetime | None
    completed_at: datetime | None
    expires_at: datetime | None
    counts: Counts = Counts()
    problem: str | None = None

    @property
    def waits(self) -> bool:
        """Whether the key waits for a person, and never ends by itself."""
        return self.status is Status.HELD or (self.stale and self.stale_policy == "reject")


@dataclass(frozen=True, slots=True)
class Detail:
    """All that is stored of one key. ``steps``: JSON texts by name, as they are stored."""

    summary: Summary
    fingerprint: str
    fingerprint_version: int
    secret_id: str | None
    steps: Mapping[str, str] = field(default_factory=dict)
    recorded: Recorded | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """The whole table at a glance.

    :ivar by_status: how many keys have each status, those that none has included.
    :ivar stale: of those in progress, how many are past their lease.
    :ivar expired: how many are past their retention, and wait for ``prune``.
    :ivar by_age: how many are younger than each number of seconds since they were stored, and not younger than the one
        before; ``None``, the last, is the rest. A key is in one of them.
    :ivar bytes: what table and indexes take; ``None`` where the store can't say.
    :ivar oldest: when the oldest key was stored.
    :ivar unknown: how many have a status that is unknown: corrupt, or of a later version.
    """

    by_status: Mapping[Status, int]
    stale: int
    expired: int
    by_age: Sequence[tuple[float | None, int]]
    bytes: int | None
    oldest: datetime | None
    counts: Counts = Counts()
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """The keys of one scope, or of one method and path.

    :ivar retried: how many of them were asked for again, as far as that was counted: their attempts always are.
    """

    scope: str | None
    method: str | None
    path: str | None
    keys: int
    retried: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Kept:
    """How many keys of a scope are kept, and in how many seconds the first of them is new again."""

    count: int
    first_ends_in: float


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the store that is not as it should be, and what to do about it.

    :ivar code: what it is, for programs.
    :ivar information: whether it is only to be known: nothing fails for it.
    :ivar seconds: how far clocks are apart, where that is what it is about.
    """

    problem: str
    remedy: str
    code: str = ""
    information: bool = False
    seconds: float = 0.0


@runtime_checkable
class Survey(Protocol):
    """Methods raise :class:`~flask_idempotency.errors.StoreError` when they can't answer."""

    def stats(self) -> Stats:
        """The whole table at a glance."""

    def tally(self, by: str) -> Iterator[Tally]:
        """The keys of each scope (``by="scope"``), or of each method and path (``by="path"``), in no order.

        A scope, or a method and path, may come several times, each time with others of its keys: the caller adds them
        up. So a store need not hold all of them at once, nor look through all its keys in one statement.

        :raises ValueError: ``by`` is neither.
        """

    def listed(self, filters: Filters, limit: int, before: int | None = None) -> Sequence[Summary]:
        """At most ``limit`` keys, those stored last first; with ``before`` only those with a smaller id."""

    def detail(self, scope: str, key: str) -> Detail | None:
        """All that is stored of one key, past its retention or not.

        :raises RowUnreadable: the row is corrupt.
        """

    def erase(self, scope: str, batch_size: int, bodies: bool = False, key: str | None = None) -> Deleted:
        """Delete at most ``batch_size`` keys of a scope, whatever their status, in transactions of its own.

        A batch that comes out short is the last one. A holder whose claim is deleted records nothing.

        :param bodies: as for ``prune()``.
        :param key: delete this key alone.
        """

    def count(self, counted: Sequence[Counted]) -> None:
        """Add to the counts of keys, in one statement. Of a key that is gone nothing is counted."""

    def kept(self, scope: str, limit: int) -> Kept:
        """How many keys of a scope are not new again yet; no more than ``limit`` are counted."""

    def check(self) -> Sequence[Finding]:
        """What is wrong with the table: missing, of an older shape, indexes gone, clocks apart."""
