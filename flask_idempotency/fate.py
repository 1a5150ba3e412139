"""What becomes of a key once the answer is made: recorded, released or held."""

from __future__ import annotations

from enum import Enum
from typing import Final

from flask import Response, current_app

from .policy import Policy

#: The statuses below 500 that ask for another try (contract, section 4).
ASK_AGAIN: Final = frozenset({401, 403, 408, 409, 423, 425, 429})


class Fate(Enum):
    """What becomes of the key; the words of ``IDEMPOTENCY_ON_ERROR``."""

    AUTO = "auto"
    RECORD = "record"
    RELEASE = "release"
    HOLD = "hold"


def fate_of(response: Response, policy: Policy, failed: bool) -> Fate:
    """The fate of a key that was answered with ``response``.

    :param failed: an exception became this answer: a 5xx of it is not for the app's rule for answers.
    :raises Exception: whatever the app's rule raises.
    """
    status = response.status_code
    if status >= 500 and failed:
        return Fate(policy.on_error)
    if policy.record is not None:
        return Fate.RECORD if current_app.ensure_sync(policy.record)(response) else Fate.RELEASE
    if status >= 500:
        return Fate(policy.on_error)
    return Fate.RELEASE if status in ASK_AGAIN else Fate.RECORD
