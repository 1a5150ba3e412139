"""The claim and the forms in which a key can be found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .recorded import Recorded


class Status(str, Enum):
    """The states of a stored key, as the column ``status`` spells them."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    HELD = "held"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that asks for a claim: all that the store writes when it grants one.

    ``token`` is the fencing token that the claim will carry. It is made before the first statement is
    sent, so that a request whose reply got lost can recognise its own claim. ``retention`` and
    ``lock_timeout`` are seconds.
    """

    scope: str
    key: str
    method: str
    path: str
    fingerprint: str
    fingerprint_version: int
    token: str
    retention: float
    lock_timeout: float
    stale_policy: str = "reexecute"


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run the view for one (scope, key); ``token`` proves it.

    ``id`` is whatever the store finds its row by. ``attempts`` counts the claims taken so far, this one
    included.
    """

    id: int
    scope: str
    key: str
    token: str
    lock_timeout: float
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """A key as it was found. All judgements of time were made by the store's own clock.

    :ivar stale: in progress, and the holder's last sign of life is older than the lease that it stored.
    :ivar expired: past its retention, and neither alive nor waiting for a person: the key is new again.
    :ivar age_seconds: seconds since the recording, since the hold or the release of a key that is held or released, or
        since the current claim's last sign of life.
    """

    scope: str
    key: str
    status: Status
    token: str
    method: str
    path: str
    fingerprint: str
    fingerprint_version: int
    attempts: int
    stale_policy: str
    stale: bool
    expired: bool
    age_seconds: float
    recorded: Recorded | None = None


def in_hand(asking: Asking, age_seconds: float = 0.0, recorded: Recorded | None = None) -> Stored:
    """A key that somebody has in hand and that no row shows yet, as far as is known: in progress, or answered."""
    return Stored(
        scope=asking.scope,
        key=asking.key,
        status=Status.IN_PROGRESS if recorded is None else Status.COMPLETED,
        token=asking.token,
        method=asking.method,
        path=asking.path,
        fingerprint=asking.fingerprint,
        fingerprint_version=asking.fingerprint_version,
        attempts=1,
        stale_policy=asking.stale_policy,
        stale=False,
        expired=False,
        age_seconds=age_seconds,
        recorded=recorded,
    )
