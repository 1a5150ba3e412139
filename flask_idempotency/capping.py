"""``IDEMPOTENCY_MAX_LIVE_KEYS``: how many keys of one scope may be kept, and when a new one is one too many.

Keys are not counted at each claim. A process counts those of a scope when it first meets the scope, and remembers the
number; it counts anew when its own claims since have used up a twentieth of the places that were left, and when the
count has become too old. So of the last twenty places each claim counts; far from the cap hardly any does.

What other processes claim meanwhile a process learns with its next count. Each of them may give away a twentieth of
the places that it counted last, and each request that was let through at the same moment one: by so much, in the
worst case, a scope may go over its cap. Replays, conflicts and retries of keys that are there are never refused.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .claim import Stored
from .forking import in_child, notice
from .store.survey import Kept

#: The part of the places left that a process gives away between two counts.
PART: Final = 20

#: Seconds that a count is good for: where at least half of the places are taken, and where fewer are. Others may have
#: claimed, and keys may have ended.
NEAR: Final = 5.0
FAR: Final = 60.0

#: Seconds for which a full scope is not counted again, if none of its keys ends sooner: a client that tries in a loop
#: costs a look-up each time, and a count each second.
FULL: Final = 1.0

#: Scopes that are remembered, some 300 bytes each; the one that was not seen for longest is forgotten.
MOST_SCOPES: Final = 10_000


class Counter(Protocol):
    """What a cap asks of a store."""

    def kept(self, scope: str, limit: int) -> Kept:
        """How many keys of a scope are not new again yet."""

    def find(self, scope: str, key: str) -> Stored | None:
        """What is stored under a key."""


@dataclass(slots=True)
class _Seen:
    """One scope, as it was counted last. ``claimed``: what this process has claimed since."""

    count: int
    #: ``time.monotonic()`` of the count, and when the first of the scope's keys is new again.
    at: float
    first_ends: float
    claimed: int = 0


class Cap:
    """The cap of one app, and what is known of its scopes."""

    def __init__(self, store: Any, most: int) -> None:
        self._store: Counter = store
        self._most = most
        self.forget()
        _all.add(self)

    def full(self, scope: str, key: str) -> float | None:
        """Whether a key is one too many: then in how many seconds the first of its scope's keys is new again, as far
        as that is known; zero where it is not. ``None``: it may be claimed, or it is there already.

        :raises StoreError: the store can't answer.
        """
        notice()
        seen = self._seen(scope)
        if seen.count + seen.claimed < self._most:
            return None
        there = self._store.find(scope, key)
        if there is not None and not there.expired:
            return None
        return max(0.0, seen.first_ends - time.monotonic())

    def claimed(self, scope: str) -> None:
        """A new key of the scope was claimed."""
        with self._lock:
            seen = self._scopes.get(scope)
            if seen is not None:
                seen.claimed += 1

    def forget(self) -> None:
        """Count everything anew."""
        self._lock = threading.Lock()
        self._scopes: OrderedDict[str, _Seen] = OrderedDict()

    def _seen(self, scope: str) -> _Seen:
        # Nothing under the lock could switch to another greenlet.
        with self._lock:
            seen = self._scopes.get(scope)
            if seen is not None:
                self._scopes.move_to_end(scope)
        if seen is not None and self._good(seen):
            return seen
        before = time.monotonic()
        # Claims of this process that are made meanwhile may be counted, or not: they count twice rather than never.
        known = 0 if seen is None else seen.claimed
        kept = self._store.kept(scope, self._most)
        counted = _Seen(kept.count, before, before + kept.first_ends_in)
        with self._lock:
            counted.claimed = max(0, seen.claimed - known) if seen is not None else 0
            self._scopes[scope] = counted
            self._scopes.move_to_end(scope)
            if len(self._scopes) > MOST_SCOPES:
                self._scopes.popitem(last=False)
        return counted

    def _good(self, seen: _Seen) -> bool:
        """Whether the last count will do."""
        now = time.monotonic()
        left = self._most - seen.count
        if left <= seen.claimed:
            # Full. Not for longer than until the first key ends, whose place is free at once.
            until = min(seen.at + FULL, seen.first_ends) if seen.first_ends > seen.at else seen.at + FULL
            return left <= 0 and now < until
        if seen.claimed and seen.claimed >= left // PART:
            return False
        return now - seen.at < (NEAR if seen.count * 2 >= self._most else FAR)


_all: Final[weakref.WeakSet[Cap]] = weakref.WeakSet()


def _forget() -> None:
    for one in list(_all):
        one.forget()


in_child(_forget)
