"""``IDEMPOTENCY_COUNT_REPLAYS``: how often a key was asked for in vain, gathered here and written in the background.

A replay adds a number in memory. One thread per app writes the numbers every few seconds, in one statement for many
keys, and ends when there is nothing to write. What a process has not written when it is killed is lost: counts are for
people, and no answer depends on them.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from itertools import islice
from typing import Any, Final

from flask import Flask

from .errors import ConfigurationError, StoreError
from .forking import in_child, notice
from .signals import conflicted, logger, mismatched, replayed
from .store.survey import EARLY, LATE, Counted, Counts

#: Seconds between two writes of one process: many replays of a client that retries in a loop make one write.
INTERVAL: Final = 5.0

#: Keys that are remembered between two writes, some 300 bytes each. Past that further ones are not counted.
MOST_KEYS: Final = 10_000

#: Keys written by one call, which all stores can do in one statement: of what fails half-way, nothing is counted twice.
AT_ONCE: Final = 50

#: How many times in a row a write may fail before what it was to write is dropped.
TRIES: Final = 10

#: Of a key's numbers, their places.
_REPLAYS, _CONFLICTS, _MISMATCHES, _EARLY, _LATE = range(5)

_Numbers = dict[tuple[str, str], list[int]]


class Counting:
    """The counts of one app, until they are written.

    :param store: has ``count``; asked from another thread only where it is ``separate``.
    """

    def __init__(self, app: Flask, store: Any) -> None:
        self._app = weakref.ref(app)
        self._store = store
        self._reset()
        replayed.connect(self._note_replay, app)
        conflicted.connect(self._note_conflict, app)
        mismatched.connect(self._note_mismatch, app)
        _all.add(self)

    def _reset(self) -> None:
        """In a forked child, too: what was counted is the parent's to write."""
        self._lock = threading.Lock()
        self._gathered: _Numbers = {}
        self._thread: threading.Thread | None = None
        self._busy = self._full = self._told = False
        self._failures = 0

    def write(self) -> int:
        """Write down what was counted so far; returns of how many keys.

        :raises StoreError: the store can't answer; the counts are kept for the next time, a few times.
        """
        while (gathered := self._taken()) is None:  # no lock is held meanwhile: it may be older than gevent's patches
            time.sleep(0.01)
        if not gathered:
            return 0
        written = 0
        try:
            while names := list(islice(gathered, AT_ONCE)):
                self._store.count([_counted(name, gathered[name]) for name in names])
                for name in names:
                    del gathered[name]
                written += len(names)
        except StoreError:
            self._failures += 1
            if self._failures < TRIES:
                self._keep(gathered)
            else:
                self._failures = 0
            raise
        finally:
            self._busy = False
        self._failures, self._told = 0, False
        return written

    def _taken(self) -> _Numbers | None:
        """What is to be written, by this thread alone; ``None`` while another one writes."""
        with self._lock:
            if self._busy:
                return None
            gathered, self._gathered, self._full = self._gathered, {}, False
            self._busy = bool(gathered)
            return gathered

    # Noted in requests

    def _note_replay(self, app: Flask, **fields: Any) -> None:
        age = fields["age_seconds"]
        self._add(fields, _REPLAYS, *((_EARLY,) if age < EARLY else (_LATE,) if age > LATE else ()))

    def _note_conflict(self, app: Flask, **fields: Any) -> None:
        self._add(fields, _CONFLICTS)

    def _note_mismatch(self, app: Flask, **fields: Any) -> None:
        self._add(fields, _MISMATCHES)

    def _add(self, fields: dict[str, Any], *places: int) -> None:
        notice()
        name = (fields["scope"], fields["key"])
        # Nothing under the lock could switch to another greenlet: it may be older than gevent's patches (--preload).
        with self._lock:
            numbers = self._gathered.get(name)
            if numbers is None and len(self._gathered) < MOST_KEYS:
                numbers = self._gathered[name] = [0] * 5
            if numbers is not None:
                for place in places:
                    numbers[place] += 1
            told, self._full = self._full, self._full or numbers is None
        if numbers is None and not told:
            logger.warning(
                "Replays of more than %d keys wait for being counted; those of further keys are not counted until "
                "they are written.",
                MOST_KEYS,
            )
        if self._thread is None and self._store.separate:
            self._start()

    # In the background

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="flask-idempotency-counting", daemon=True)
        with self._lock:
            if self._thread is not None:
                return
            self._thread = thread
        try:
            thread.start()
        except BaseException:
            self._thread = None
            raise

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL * min(self._failures + 1, TRIES))
            self._write_quietly()
            with self._lock:
                if not self._gathered:
                    self._thread = None
                    return

    def _write_quietly(self) -> None:
        """Write, and say once per outage why that fails."""
        try:
            self.write()
        except Exception as error:
            told, self._told = self._told, True
            if not told:
                known = isinstance(error, StoreError)
                logger.error("Counts of replays can't be written: %s", error, exc_info=None if known else error)

    def _keep(self, gathered: _Numbers) -> None:
        """What could not be written, beside what has come meanwhile."""
        with self._lock:
            for name, numbers in gathered.items():
                now = self._gathered.get(name)
                if now is not None:
                    self._gathered[name] = [one + other for one, other in zip(now, numbers, strict=True)]
                elif len(self._gathered) < MOST_KEYS:
                    self._gathered[name] = numbers


# Nothing here keeps an app: until its first request a store leads to it, by the function that gives the engine.
_all: Final[weakref.WeakSet[Counting]] = weakref.WeakSet()


def write_counts(app: Flask) -> int:
    """Write down at once what this process has counted so far for an app, for tests say; returns of how many keys.

    In an SQLite database in memory, whose one connection is the app's own, counts are written by this alone.

    :raises StoreError: the store can't answer, or its table has no columns for counts yet.
    :raises ConfigurationError: the app does not count.
    """
    counting = next((one for one in list(_all) if one._app() == app), None)
    if counting is None:
        raise ConfigurationError(f"The app {app.name!r} does not count replays: set IDEMPOTENCY_COUNT_REPLAYS.")
    return counting.write()


def _counted(name: tuple[str, str], numbers: list[int]) -> Counted:
    return Counted(*name, Counts(*numbers))


def _write_last() -> None:
    """At exit, unless the store could not answer the last time: nobody is to wait for a database that is down."""
    for one in list(_all):
        if not (one._failures or one._busy) and one._gathered and one._store.separate:
            one._write_quietly()


def _forget() -> None:
    for one in list(_all):
        one._reset()


in_child(_forget)
atexit.register(_write_last)
