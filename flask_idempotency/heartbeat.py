"""The lease's other half: one thread per process that renews all live claims.

A second thread does what may take its time, so that no renewal waits for it: it repeats what could not be written
when it was due, the answer or the release of a claim, fenced by the token, until it succeeds or the process ends; it
gives up claims that a request may have got and never heard of; and it tells of lost claims. Both threads start on
first need, never keep the process alive, and are not inherited by a forked child: the child holds none of its
parent's claims.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from .claim import Asking, Claim
from .errors import RecordRefused, StoreError
from .forking import in_child
from .recorded import Recorded
from .signals import logger
from .store.base import Store
from .threads import Chores, threads_run

#: How often a lease is renewed while it runs. With a third, two renewals may fail before a live claim is lost.
RENEWALS_PER_LEASE: Final = 3

#: How long after a failed call it is repeated, as a part of the lease: soon enough for several tries within it.
RETRIES_PER_LEASE: Final = 10


@dataclass
class Settlement:
    """What is to be written for a claim: its answer; where that is ``None`` its release, or that it is held."""

    asking: Asking
    recorded: Recorded | None
    #: Seconds.
    retention: float
    #: Called once it is written; with false when the claim had been taken over.
    written: Callable[[bool], None]
    #: ``time.monotonic()`` when it should have been written.
    since: float = field(default_factory=time.monotonic)
    #: Whether it was tried before, and may have been carried out, its reply alone lost.
    tried: bool = False
    #: Whether the outcome is unknown, and the key waits for a person.
    held: bool = False
    #: Called when the store can't hold the answer, before the key is completed without it.
    refused: Callable[[RecordRefused], None] = lambda error: None

    def write(self, store: Store, claim: Claim) -> bool:
        """Try it once. False: the claim was lost.

        :raises StoreError: nothing is known to have been written.
        """
        again, self.tried = self.tried, True
        if self.recorded is not None:
            return store.record(claim, self.recorded, self.retention)
        if self.held:
            return store.hold(claim)
        return store.release(claim) or (again and not _taken_over(store, claim))

    def give_up_answer(self, error: RecordRefused) -> None:
        """Complete the key without its answer, which the store can't hold."""
        self.refused(error)
        self.recorded = self.recorded and self.recorded.without_answer()


def _taken_over(store: Store, claim: Claim) -> bool:
    """Whether a claim that is gone was taken over, rather than released by an earlier try: that counts its holders."""
    found = store.find(claim.scope, claim.key)
    return found is not None and found.attempts > claim.attempts


@dataclass
class _Live:
    store: Store
    claim: Claim
    lost: Callable[[], None]
    due: float
    #: The answer is being written: whether the claim still holds is for that write to say.
    settling: bool = False
    settlement: Settlement | None = field(default=None)
    #: The second thread is about to write it, or does.
    writing: bool = False
    #: The last renewal failed.
    failing: bool = False

    @property
    def name(self) -> tuple[int, str, str]:
        return id(self.store), self.claim.scope, self.claim.key

    def later(self, per_lease: int) -> None:
        self.due = time.monotonic() + self.claim.lock_timeout / per_lease


@dataclass
class _Unheard:
    """A claim that a request may have been granted, for all that it knows: the reply never came, and it was refused."""

    store: Store
    asking: Asking
    since: float = field(default_factory=time.monotonic)
    due: float = 0.0

    @property
    def over(self) -> bool:
        """Whether its lease, if it was granted, is over: then it is in nobody's way."""
        return time.monotonic() > self.since + self.asking.lock_timeout

    def given_up(self) -> bool:
        """Release it, if it is there. False: the store can't answer yet.

        One that took over another's stays: its row is what tells the next attempt that there was a first.
        """
        try:
            found = self.store.find(self.asking.scope, self.asking.key)
            if found is not None and found.token == self.asking.token and found.attempts == 1:
                claim = self.store.claim(self.asking)
                if isinstance(claim, Claim):
                    self.store.release(claim)
        except Exception:
            return False
        return True


class Heartbeat:
    """All live claims of a process, and the thread that keeps them."""

    def __init__(self) -> None:
        self._reset()

    def keep(self, store: Store, claim: Claim, lost: Callable[[], None]) -> None:
        """Renew a claim from now on. ``lost`` is called, once, when it turns out to have been taken over."""
        live = _Live(store, claim, lost, due=0.0)
        live.later(RENEWALS_PER_LEASE)
        with self._changed:
            self._live[claim.token] = live
            if live.due < self._wakes:
                self._changed.notify()
        if store.separate:
            self._start()

    def holds(self, token: str) -> bool:
        """Whether this process has that claim."""
        return token in self._live

    def count(self, store: Store) -> int:
        """How many claims of a store this process has."""
        return sum(one.store is store for one in list(self._live.values()))

    def settling(self, claim: Claim) -> bool:
        """Note that the claim's end is being written. False when the claim is known to be lost."""
        with self._changed:
            live = self._live.get(claim.token)
            if live is not None:
                live.settling = True
            return live is not None

    def drop(self, claim: Claim) -> None:
        """Stop renewing: the claim is settled, or left to its lease. What is postponed stays until it is written."""
        with self._changed:
            live = self._live.get(claim.token)
            if live is not None and live.settlement is None:
                del self._live[claim.token]

    def lose(self, claim: Claim) -> None:
        """The holder itself has found that the claim was taken over: say so, once."""
        with self._changed:
            live = self._live.get(claim.token)
            gone = None if live is None or live.settling else self._live.pop(claim.token)
        if gone is not None:
            gone.lost()

    def postpone(self, claim: Claim, settlement: Settlement) -> None:
        """Keep what could not be written, go on renewing, and repeat the write."""
        with self._changed:
            live = self._live[claim.token]
            live.settling, live.settlement = True, settlement
            self._postponed[live.name] = live
            live.later(RETRIES_PER_LEASE)
            self._changed.notify()

    def postponed(self, store: Store, scope: str, key: str) -> Settlement | None:
        """What is still to be written for a key; one try at writing it is made first."""
        live = self._postponed.get((id(store), scope, key))
        if live is None:
            return None
        self._settle(live)
        return live.settlement if self.holds(live.claim.token) else None

    def give_up(self, store: Store, asking: Asking) -> None:
        """Release what the store may have granted to a request that had no reply, once the store answers again."""
        if not store.separate:
            return
        with self._changed:
            self._unheard[asking.token] = _Unheard(store, asking)
            self._changed.notify()
        self._start()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._live: dict[str, _Live] = {}
        self._unheard: dict[str, _Unheard] = {}
        self._giving_up = False
        self._postponed: dict[tuple[int, str, str], _Live] = {}
        self._thread: threading.Thread | None = None
        self._wakes = 0.0
        self._chores = Chores()

    def _start(self) -> None:
        # Nothing in here that could switch to another greenlet stands under the lock: is_alive() and start() do, and
        # a lock that was made before gevent patched the process (gunicorn --preload) would stop all of them.
        old = self._thread
        if old is not None and (old.ident is None or old.is_alive()):  # without an identity: just being started
            return
        with self._changed:
            if self._thread is not old:
                return
            thread = self._thread = threading.Thread(target=self._run, name="flask-idempotency", daemon=True)
        if not threads_run():
            logger.error(
                "Threads run only now and then in this server, so claims may not be renewed, and a view that takes "
                "longer than the lease can run twice; nor is a recording that failed repeated. Start uWSGI with "
                "--enable-threads."
            )
        try:
            thread.start()
        except BaseException:
            self._thread = None
            raise

    def _run(self) -> None:
        while True:
            with self._changed:
                dues = [one.due for one in self._live.values() if one.store.separate]
                dues += [one.due for one in self._unheard.values() if not self._giving_up]
                self._wakes = min(dues, default=time.monotonic() + threading.TIMEOUT_MAX / 2)
                self._changed.wait(max(0.0, min(self._wakes - time.monotonic(), threading.TIMEOUT_MAX / 2)))
                # Until the next pause every new claim is seen without a notification.
                self._wakes = 0.0
            try:
                self._beat()
            except Exception:
                # A thread that ended here would let every later claim run out: better a line in the log each beat.
                logger.exception("Renewing claims failed.")
                time.sleep(0.1)

    def _beat(self) -> None:
        now = time.monotonic()
        with self._changed:
            live = [one for one in self._live.values() if one.store.separate]
        for one in live:
            if one.settlement and one.due <= now and not one.writing:
                one.writing = True
                self._chores.put(partial(self._repeat, one))
        for store in {id(one.store): one.store for one in live if one.due <= now}.values():
            # All of the store's claims, due or not: one statement serves them all.
            self._renew(store, [one for one in live if one.store is store and self.holds(one.claim.token)])
        if any(one.due <= now for one in self._unheard.values()) and not self._giving_up:
            self._giving_up = True
            self._chores.put(self._give_up)

    def _renew(self, store: Store, live: list[_Live]) -> None:
        if not live:
            return
        try:
            held = store.renew([one.claim for one in live])
        except Exception as error:
            # Any, not StoreError alone: a fault in one app's store must not keep other apps' claims from renewal.
            unforeseen = not isinstance(error, StoreError)
            if not all(one.failing for one in live):  # else it was said, and an outage may be long
                level, what = logging.ERROR if unforeseen else logging.WARNING, "claim" if len(live) == 1 else "claims"
                text = "Renewing %d %s failed and is repeated: %s"
                logger.log(level, text, len(live), what, error, exc_info=unforeseen)
            for one in live:
                one.failing = True
                one.later(RETRIES_PER_LEASE)
            return
        for one in live:
            one.failing = False
            one.later(RETRIES_PER_LEASE if one.settlement else RENEWALS_PER_LEASE)
            if one.claim.token not in held:
                self._lose(one)

    def _lose(self, one: _Live) -> None:
        with self._changed:
            # Settled in the meantime, or about to be: then the write itself finds out.
            gone = None if one.settling else self._live.pop(one.claim.token, None)
        if gone is not None:
            self._chores.put(one.lost)

    def _repeat(self, one: _Live) -> None:
        try:
            self._settle(one)
        finally:
            one.writing = False

    def _settle(self, one: _Live) -> None:
        settlement = one.settlement
        assert settlement is not None
        try:
            held = settlement.write(one.store, one.claim)
        except Exception as error:
            if isinstance(error, RecordRefused):
                settlement.give_up_answer(error)
            elif not isinstance(error, StoreError):
                logger.exception("Writing what was postponed failed, and is repeated.")
            one.later(RETRIES_PER_LEASE)
            return
        with self._changed:
            first = self._live.pop(one.claim.token, None)
            self._postponed.pop(one.name, None)
        if first:
            settlement.written(held)

    def _give_up(self) -> None:
        try:
            self._give_up_due()
        finally:
            self._giving_up = False
            with self._changed:
                self._changed.notify()

    def _give_up_due(self) -> None:
        now = time.monotonic()
        silent: set[int] = set()
        for token, one in list(self._unheard.items()):
            if one.due > now:
                continue
            # A store that failed once is not asked again for each of them: renewals are due too.
            if one.over or (id(one.store) not in silent and one.given_up()):
                with self._changed:
                    self._unheard.pop(token, None)
            else:
                silent.add(id(one.store))
                one.due = now + one.asking.lock_timeout / RETRIES_PER_LEASE


#: The process's own.
heartbeat: Final = Heartbeat()

in_child(heartbeat._reset)
