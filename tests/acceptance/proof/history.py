"""What happened, as those who took part saw it: values alone, so that a history can be written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

#: The modes that are put to the proof: each is a route of the app.
Mode = Literal["default", "atomic", "steps"]
MODES: tuple[Mode, ...] = ("default", "atomic", "steps")

#: What the app tells. A view has `begun`, and `ended` or `failed` by an exception; a step's result is stored
#: (`stepped`); the rest are the extension's signals, which a kill may come before.
Kind = Literal[
    "begun", "ended", "failed", "stepped",
    "executed", "released", "held", "taken_over", "claim_lost", "record_failed",
]  # fmt: skip
SIGNALS: tuple[Kind, ...] = ("executed", "released", "held", "taken_over", "claim_lost", "record_failed")

UNKNOWN = "urn:problem-type:idempotency:outcome-unknown"


@dataclass(frozen=True)
class Answer:
    """A final answer. ``run`` names the run of the view that made it, where it says so."""

    key: str
    status: int
    body: str
    replay: bool = False
    run: str | None = None

    @property
    def held(self) -> bool:
        """Whether it says that the outcome is unknown."""
        return self.status == 409 and UNKNOWN in self.body


@dataclass(frozen=True)
class Event:
    """A line of the app's log; its place there is its time. ``run`` names the run of the view that it is about."""

    kind: Kind
    key: str
    run: str
    pid: int = 0


@dataclass(frozen=True)
class Row:
    """A committed row of the app's own table."""

    id: int
    key: str
    run: str


@dataclass(frozen=True)
class Charge:
    """What the payment provider did under one key of its own: for which of our keys, and the runs that called."""

    derived: str
    charge: str
    key: str
    runs: tuple[str, ...]


@dataclass
class History:
    """All of it.

    :ivar modes: each key that was sent, with the mode of its route.
    :ivar answers: the final answers, of all clients.
    :ivar stuck: a key for each client that never got a final answer, though the faults had ended.
    :ivar events: the app's log, in its order.
    :ivar rows: what is committed in the end.
    :ivar charges: what the provider did.
    """

    modes: dict[str, Mode] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)

    def count(self, kind: Kind) -> Counter[str]:
        """How often something happened to each key."""
        return Counter(event.key for event in self.events if event.kind == kind)

    def runs(self, *kinds: Kind) -> set[str]:
        """The runs that one of these things happened to."""
        return {event.run for event in self.events if event.kind in kinds}


def by_key(values: Iterable[Answer]) -> dict[str, list[Answer]]:
    """The answers of each key."""
    found: dict[str, list[Answer]] = {}
    for value in values:
        found.setdefault(value.key, []).append(value)
    return found
