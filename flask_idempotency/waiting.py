"""How a duplicate waits for the request in flight: bounded in time, in places, and in looks without waiting."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Final

#: How often a key is looked at again when it changed between two statements. Each time means that another
#: request moved it; ten such moves within one request's few milliseconds mean that something is wrong.
LOOKS: Final = 10

#: How many requests of one process and app may wait for a claim in flight. Two leave the other threads of even
#: a small worker to the requests that have something to do; whoever finds no place gets 409 at once.
WAITERS: Final = 2

#: A waiter's pauses, in seconds: short at first, since most views are quick.
SHORTEST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5

#: The system's, so that an app's seeded `random` is left alone.
_jitter = random.SystemRandom()


class Waiting:
    """A duplicate's time and place to wait. It holds no connection and no claim meanwhile."""

    def __init__(self, seconds: float, places: threading.Semaphore) -> None:
        self._begun = time.monotonic()
        self._until = self._begun + seconds
        self._places = places
        self._has_place = False
        self._pause = SHORTEST_PAUSE
        self.waited = 0.0

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_place:
            self._places.release()

    def looks(self) -> Iterator[None]:
        """One more look each time, as long as the waiting lasts, and a bounded number without waiting."""
        looks = 0
        while looks < LOOKS:
            waited = self.waited
            yield
            looks = looks + 1 if self.waited == waited else 0

    def pause(self) -> bool:
        """Wait a little. False at once when the time is over or all places are taken."""
        now = time.monotonic()
        left = self._until - now
        if self._has_place:
            self.waited = now - self._begun  # the look before this took its time, too
        if left <= 0 or not (self._has_place or self._places.acquire(blocking=False)):
            return False
        self._has_place = True
        # Jitter, so that waiters of many processes do not look at once.
        time.sleep(min(left, self._pause * _jitter.uniform(0.5, 1.0)))
        self._pause = min(self._pause * 1.5, LONGEST_PAUSE)
        self.waited = time.monotonic() - self._begun
        return True
