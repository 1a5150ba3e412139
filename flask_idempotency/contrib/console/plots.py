"""Plots as data: bars that the templates draw as SVG, beside a table that says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...overview import Rank
from ...store.survey import EARLY, LATE, Counts, Stats

#: Of the longest bar, in the drawing's own units.
WIDEST: Final = 150

#: Endpoints in one plot, and the letters that there is room for beside its bars.
_ENDPOINTS: Final = 10
_LETTERS: Final = 16


@dataclass(frozen=True)
class Bar:
    """One bar: what it stands for, how many, and how long it is drawn."""

    label: str
    value: int
    width: int

    @property
    def short(self) -> str:
        """The label, cut to the room that there is beside the bar."""
        return self.label if len(self.label) <= _LETTERS else self.label[: _LETTERS - 1] + "…"


@dataclass(frozen=True)
class Plot:
    """Bars that are compared with each other. ``name`` is part of the ids in the page."""

    name: str
    title: str
    head: str
    bars: tuple[Bar, ...]

    @property
    def said(self) -> str:
        """What the bars show, in words."""
        return ", ".join(f"{bar.label}: {bar.value}" for bar in self.bars) + "."


def plot(name: str, title: str, head: str, values: Sequence[tuple[str, int]]) -> Plot:
    """A plot of values by their labels. What is not zero has a bar that can be seen."""
    most = max((value for _, value in values), default=0)
    bars = (
        Bar(label, value, max(2, round(WIDEST * value / most)) if value > 0 and most else 0) for label, value in values
    )
    return Plot(name, title, head, tuple(bars))


def of_outcomes(counts: Counts) -> Plot:
    """What became of requests with a known key."""
    values = [("replays", counts.replays), ("conflicts", counts.conflicts), ("mismatches", counts.mismatches)]
    return plot("outcomes", "Outcomes of retries", "Outcome", values)


def of_ages(counts: Counts) -> Plot:
    """How old records were when they were replayed."""
    between = max(0, counts.replays - counts.early - counts.late)
    values = [
        (f"under {EARLY:g} s", counts.early),
        (f"{EARLY:g} to {LATE:g} s", between),
        (f"over {LATE:g} s", counts.late),
    ]
    return plot("ages", "Age of the record at a replay", "Age", values)


def of_endpoints(ranks: Sequence[Rank]) -> Plot:
    """For which endpoints requests came with a known key, most first."""
    values = [(one.name, one.vain) for one in ranks[:_ENDPOINTS]]
    return plot("endpoints", "Requests with a known key", "Endpoint", values)


def of_statuses(stats: Stats) -> Plot:
    """How many keys have each status."""
    values = [(status.value, number) for status, number in stats.by_status.items()]
    if stats.unknown:
        values.append(("unknown", stats.unknown))
    return plot("statuses", "Keys by status", "Status", values)


def of_stored(stats: Stats) -> Plot:
    """How long ago keys were stored."""
    values, last = [], ""
    for bound, number in stats.by_age:
        here = "" if bound is None else span(bound)
        label = f"over {last}" if bound is None else f"{last} to {here}" if last else f"under {here}"
        values.append((label, number))
        last = here
    return plot("stored", "Keys by the time since they were stored", "Time", values)


def span(seconds: float) -> str:
    """A number of seconds in the largest unit that goes into it."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
