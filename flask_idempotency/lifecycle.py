"""The protocol, without Flask: begin, then finish, release, hold or abandon.

``begin`` decides between running the view, replaying and refusing; every race in it is decided by one statement
of the store. Whoever has a claim ends it in exactly one of four ways: ``finish`` records the answer, ``release``
gives the key back, ``hold`` leaves it to a person, ``abandon`` leaves it to the lease, as a crash does. A process
killed at any line leaves either no claim, or one whose lease runs out, or a key that is finished or held.

In atomic mode the desk is a transaction of the app's, and the claim ends with that.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from . import errors
from .claim import Asking, Claim, Status, Stored, in_hand
from .heartbeat import Heartbeat, Settlement
from .policy import Policy
from .recorded import Recorded
from .signals import logger
from .store.base import Store
from .waiting import LOOKS, WAITERS, Waiting


@dataclass(frozen=True)
class Request:
    """What a request asks for.

    ``fingerprint`` gives its fingerprint by a version, made with the same encryption key as a stored one, if any, or as
    today's where that is empty; ``version`` is today's.
    """

    scope: str
    key: str
    method: str
    path: str
    version: int
    fingerprint: Callable[[int, str], str]
    policy: Policy


@dataclass(frozen=True)
class Granted:
    """The view is to run under this claim. ``over`` is the claim that it took over, if it did."""

    asking: Asking
    claim: Claim
    over: Stored | None = None


@dataclass(frozen=True)
class Replay:
    """The answer is there."""

    asking: Asking
    recorded: Recorded
    stored: Stored


class Refused(Exception):
    """The request gets neither: ``error`` is the class of its answer."""

    def __init__(self, asking: Asking, error: type[errors.IdempotencyError], stored: Stored, waited: float) -> None:
        super().__init__(error.__name__)
        self.asking = asking
        self.error = error
        self.stored = stored
        self.waited = waited


class Desk(Protocol):
    """Where a claim is asked for: the store itself, or a transaction of the app's."""

    def claim(self, asking: Asking) -> Claim | Stored:
        """Take a key that is not there, or return what is."""

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored``; ``None``: somebody else was first."""


class Watcher(Protocol):
    """Who is told how a claim ended. Calls may come from the heartbeat's thread."""

    def settled(self) -> None:
        """The answer is kept, or the claim is given up, for certain: at once, or after a failed write."""

    def lost(self) -> None:
        """The claim had been taken over; nothing was written."""

    def failed(self, error: Exception) -> None:
        """The answer could not be written as it should. What can be repeated will be."""


@dataclass
class Lifecycle:
    """One app's: its store, and the process's heartbeat.

    ``counters`` are called when a claim of this process begins or is left to its lease, of which no event tells.
    """

    store: Store
    heartbeat: Heartbeat
    places: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(WAITERS))
    counters: list[Callable[[], None]] = field(default_factory=list)

    def begin(self, request: Request, desk: Desk | None = None) -> Granted | Replay:
        """The claim, or the record.

        :param desk: where to ask; the store if left out.
        :raises Refused: neither, for a reason that the client can act on.
        :raises errors.StoreError: the store can't answer; nothing runs.
        """
        # The token is made before any statement: a request whose reply got lost recognises its claim by it.
        asking = _asking(request, secrets.token_hex(16))
        try:
            return self._begin(request, asking, desk or self.store)
        except (errors.WriterHeld, errors.RowUnreadable):
            raise
        except errors.StoreError:
            if desk is not None:
                raise  # what a transaction leaves, the database takes back
            # A claim may have been granted all the same. Nobody will use it, and the key is not to be blocked by it.
            self.heartbeat.give_up(self.store, asking)
            raise

    def _begin(self, request: Request, asking: Asking, desk: Desk) -> Granted | Replay:
        with Waiting(request.policy.wait, self.places) as waiting:
            for _ in waiting.looks():
                found = self._find(asking, desk)
                if isinstance(found, Claim):
                    return Granted(asking, found)
                verdict = judge(found, request)
                if verdict is Verdict.TAKE:
                    # Decided by the store: of all that try, one gets it, and the rest look again.
                    claim = desk.take(_as_found(asking, found), found)
                    if claim is not None:
                        return Granted(asking, claim, over=found if found.stale and not found.expired else None)
                elif verdict is Verdict.REPLAY and found.recorded is not None:
                    return Replay(asking, found.recorded, found)
                elif verdict is not errors.InFlight or not waiting.pause():
                    assert not isinstance(verdict, Verdict)
                    raise Refused(asking, verdict, found, waiting.waited)
        raise errors.StoreError(f"The key changed {LOOKS} times while it was looked at.")

    def keep(self, granted: Granted, watcher: Watcher) -> None:
        """Renew the claim from now on."""
        self.heartbeat.keep(self.store, granted.claim, watcher.lost)
        self._count()

    def finish(self, granted: Granted, recorded: Recorded, retention: float, watcher: Watcher) -> None:
        """Record the answer, kept for ``retention`` seconds from now."""
        settlement = Settlement(granted.asking, recorded, retention, _telling(watcher), refused=watcher.failed)
        self._settle(granted.claim, settlement, watcher)

    def end_later(
        self, granted: Granted, recorded: Recorded | None, retention: float, watcher: Watcher, *, held: bool
    ) -> None:
        """Record, hold or release soon, from the heartbeat: for callers that must not wait for the store."""
        settlement = Settlement(granted.asking, recorded, retention, _telling(watcher), held=held)
        if self.heartbeat.settling(granted.claim):
            self.heartbeat.postpone(granted.claim, settlement)

    def release(self, granted: Granted, watcher: Watcher) -> None:
        """Give the claim up with nothing recorded, so that the next retry runs at once."""
        self._settle(granted.claim, Settlement(granted.asking, None, 0.0, _telling(watcher)), watcher)

    def hold(self, granted: Granted, watcher: Watcher) -> None:
        """Leave the key to a person: something was committed, and no answer says what."""
        settlement = Settlement(granted.asking, None, 0.0, _telling(watcher), held=True)
        self._settle(granted.claim, settlement, watcher)

    def abandon(self, granted: Granted) -> None:
        """Leave the claim to its lease: what a crash leaves. Nothing is known of what the view did."""
        self.heartbeat.drop(granted.claim)
        self._count()

    def lose(self, granted: Granted) -> None:
        """The holder has found that its claim was taken over: tell its watcher, once."""
        self.heartbeat.lose(granted.claim)

    def _count(self) -> None:
        for counter in self.counters:
            try:
                counter()
            except Exception:
                logger.exception("A counter of claims failed.")

    def _find(self, asking: Asking, desk: Desk) -> Claim | Stored:
        postponed = self.heartbeat.postponed(self.store, asking.scope, asking.key)
        if postponed is not None:
            return _as_stored(postponed)
        found = desk.claim(asking)
        if isinstance(found, Stored) and not self.store.separate and self.heartbeat.holds(found.token):
            # Nothing renews a claim in SQLite's memory, which is this process's alone: whoever it holds, lives.
            return replace(found, stale=False, expired=False)
        return found

    def _settle(self, claim: Claim, settlement: Settlement, watcher: Watcher) -> None:
        if not self.heartbeat.settling(claim):
            return  # taken over: that was signalled when it was found out, and the other run's answer stays
        try:
            try:
                held = settlement.write(self.store, claim)
            except errors.RecordRefused as error:
                settlement.give_up_answer(error)
                held = settlement.write(self.store, claim)
        except errors.StoreError as error:
            self.heartbeat.postpone(claim, settlement)
            # The app's own uncommitted work is in the way, no fault: it will be written once that has ended.
            if not isinstance(error, errors.WriterHeld):
                watcher.failed(error)
        except BaseException:
            self.heartbeat.drop(claim)
            raise
        else:
            self.heartbeat.drop(claim)
            settlement.written(held)


def _telling(watcher: Watcher) -> Callable[[bool], None]:
    return lambda held: watcher.settled() if held else watcher.lost()


class Verdict(Enum):
    """What a stored key means for a request, beside the errors that it can mean."""

    REPLAY = "replay"
    TAKE = "take"


def judge(stored: Stored, request: Request) -> Verdict | type[errors.IdempotencyError]:
    """What the request gets for the key as it was found (contract, section 3)."""
    if stored.expired:
        return Verdict.TAKE
    if request.fingerprint(stored.fingerprint_version, stored.fingerprint) != stored.fingerprint:
        return _judge_other(stored, request.policy)
    if stored.status is Status.COMPLETED:
        return _judge_completed(stored)
    if stored.status is Status.HELD:
        return errors.OutcomeUnknown
    if stored.status is Status.RELEASED:
        return Verdict.TAKE
    if not stored.stale:
        return errors.InFlight
    # The holder's own policy decides: it knew what its view does.
    return Verdict.TAKE if stored.stale_policy == "reexecute" else errors.OutcomeUnknown


def _judge_other(stored: Stored, policy: Policy) -> Verdict | type[errors.IdempotencyError]:
    """Another request under a used key. It never takes over: the first one's outcome belongs to the first one."""
    if policy.on_mismatch == "replay":
        if stored.status is Status.COMPLETED:
            return _judge_completed(stored)
        if stored.status is Status.IN_PROGRESS and not stored.stale:
            return errors.InFlight
    return errors.KeyReused


def _judge_completed(stored: Stored) -> Verdict | type[errors.IdempotencyError]:
    return Verdict.REPLAY if stored.recorded and stored.recorded.available else errors.RecordUnavailable


def _asking(request: Request, token: str) -> Asking:
    policy = request.policy
    return Asking(
        scope=request.scope,
        key=request.key,
        method=request.method,
        path=request.path,
        fingerprint=request.fingerprint(request.version, ""),
        fingerprint_version=request.version,
        token=token,
        retention=policy.retention,
        lock_timeout=policy.lock_timeout,
        stale_policy=policy.stale,
    )


def _as_found(asking: Asking, found: Stored) -> Asking:
    """With the fingerprint that a row of an older version has: the same request's, as judging has shown."""
    if found.expired:
        return asking
    return replace(asking, fingerprint=found.fingerprint, fingerprint_version=found.fingerprint_version)


def _as_stored(settlement: Settlement) -> Stored:
    """A key whose end could not be written yet.

    An answer is given, as the first client got it. That the key is released or held is said only when it is so: if
    this process dies first, the lease decides, and "never again" would have been said of what is run again.
    """
    return in_hand(settlement.asking, time.monotonic() - settlement.since, settlement.recorded)
