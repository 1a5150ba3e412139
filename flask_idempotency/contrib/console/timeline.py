"""What happened to one key, in order, as far as its row tells."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ...claim import Status
from ...store.survey import Summary


@dataclass(frozen=True)
class Happening:
    """One line of the timeline.

    :ivar after: seconds since the key was stored, by the store's clock.
    """

    when: datetime
    after: float
    what: str
    more: str


def timeline(one: Summary) -> list[Happening]:
    """The times of a key, the earliest first. What is to come is among them."""
    lines = [(one.created_at, "Claimed for the first time", ""), (one.locked_at, *_last_sign(one))]
    if one.completed_at is not None:
        lines.append((one.completed_at, "Completed", f"Recorded with status {one.response_status}."))
    if not one.waits:
        lines.append((one.expires_at, "Retention ended" if one.expired else "Retention ends", _then(one)))
    # A row that can be read has all of them.
    known = [(when, what, more) for when, what, more in lines if when is not None]
    known.sort(key=lambda line: line[0])  # of one moment, in the order in which they are written above
    begin = known[0][0]
    return [Happening(when, (when - begin).total_seconds(), what, more) for when, what, more in known]


def attempts(one: Summary) -> str:
    """How often a claim was taken, in words. Only the last one's times are kept."""
    if one.attempts == 1:
        return "1, with no takeover"
    again = one.attempts - 1
    return f"{one.attempts}: the first, and {again} by takeover or after a release with steps"


def lives(one: Summary) -> bool:
    """Whether the claim's lease is not over: its view may be running."""
    return one.status is Status.IN_PROGRESS and not one.stale


def _then(one: Summary) -> str:
    if lives(one):
        return "As long as the claim is alive, nothing ends it; an answer is kept from its recording on."
    return "The key is new again from then on."


def _last_sign(one: Summary) -> tuple[str, str]:
    lease = f"The lease is {one.lock_timeout:g} s."
    if one.status is Status.HELD:
        return "Held", "Its outcome is unknown. It waits for a person, and retries get 409."
    if one.status is Status.RELEASED:
        return "Released", "The next retry runs the view, with the steps that are kept."
    if one.status is Status.COMPLETED:
        return "Last sign of life", lease
    if not one.stale:
        return "Last sign of life", f"{lease} The claim is alive."
    then = "Retries get 409 until a person settles it." if one.waits else "The next retry takes it over."
    return "Last sign of life", f"{lease} It is over. {then}"
