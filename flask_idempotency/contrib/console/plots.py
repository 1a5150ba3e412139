"""Plots as data: bars that the templates draw as SVG, beside a table that says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...store.survey import EARLY, LATE, Counts, Stats

#: Of the longest bar, in the drawing's own units.
WIDEST: Final = 150


@dataclass(frozen=True)
class Bar:
    """One bar: what it stands for, how many, and how long it is drawn."""

    label: str
    value: int
    width: int


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


def of_outcomes(counts: Counts, name: str = "outcomes") -> Plot:
    """What became of requests with a known key."""
    values = [("replays", counts.replays), ("conflicts", counts.conflicts), ("mismatches", counts.mismatches)]
    return plot(name, "Outcomes of retries", "Outcome", values)


def of_ages(counts: Counts, name: str = "ages") -> Plot:
    """How old records were when they were replayed."""
    between = max(0, counts.replays - counts.early - counts.late)
    values = [
        (f"under {EARLY:g} s", counts.early),
        (f"{EARLY:g} to {LATE:g} s", between),
        (f"over {LATE:g} s", counts.late),
    ]
    return plot(name, "Age of the record at a replay", "Age", values)


def of_statuses(stats: Stats) -> Plot:
    """How many keys have each status."""
    values = [(status.value, number) for status, number in stats.by_status.items()]
    if stats.unknown:
        values.append(("unknown", stats.unknown))
    return plot("statuses", "Keys by status", "Status", values)


def of_stored(stats: Stats) -> Plot:
    """How long ago keys were stored."""
    values, last = [], 0.0
    for bound, number in stats.by_age:
        values.append((f"over {span(last)}" if bound is None else f"under {span(bound)}", number))
        last = last if bound is None else bound
    return plot("stored", "Keys by the time since they were stored", "Time", values)


def span(seconds: float) -> str:
    """A number of seconds in the largest unit that it fills."""
    for size, unit in ((604_800, "week"), (86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size and seconds % size == 0:
            number = int(seconds // size)
            return f"{number} {unit}" + ("" if number == 1 else "s")
    return f"{seconds:g} seconds"
