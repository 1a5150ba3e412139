"""Variants measured in turn: A B C, then B C A, then C A B; each compared with the base of its own round.

What a machine does beside the measurement changes from one second to the next. Within a round it meets all variants
alike, so a ratio is taken within each round, and only then are the rounds summed up by their median and quartiles.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

#: What one variant gave in one round, by the figure's name: seconds a call, say.
Sample = Mapping[str, float]

#: The figure of :func:`timed`.
SECONDS: Final = "seconds"


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Sum up one value a round; a single one is all three."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass
class Series:
    """What one variant gave, a sample for each round."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    def values(self, figure: str = SECONDS) -> list[float]:
        """One figure, for each round."""
        return [sample[figure] for sample in self.samples]

    def spread(self, figure: str = SECONDS) -> Spread:
        """One figure, summed up."""
        return Spread.of(self.values(figure))

    def ratio(self, base: Series, figure: str = SECONDS) -> Spread:
        """One figure as a multiple of the base's in the same round, summed up."""
        pairs = zip(self.values(figure), base.values(figure), strict=True)
        return Spread.of([mine / other for mine, other in pairs])


def timed(
    call: Callable[..., object],
    fresh: Callable[[], Any] | None = None,
    calls: int = 50,
    summed: Callable[[list[float]], float] = statistics.median,
) -> Callable[[], Sample]:
    """A measurement of one variant: the time of a call, in seconds, over so many calls.

    :param call: what is measured. With ``fresh`` it takes what that returns.
    :param fresh: makes what a call uses up (a request with a new key); its time does not count.
    :param summed: what stands for the calls of a round: their median, or ``statistics.mean``.
    """

    def measure() -> Sample:
        gc.collect()  # each variant pays for its own litter
        times = []
        for _ in range(calls):
            given = () if fresh is None else (fresh(),)
            begin = time.perf_counter()
            call(*given)
            times.append(time.perf_counter() - begin)
        return {SECONDS: summed(times)}

    return measure


def interleaved(variants: Mapping[str, Callable[[], Sample]], rounds: int, warm_up: int = 1) -> dict[str, Series]:
    """Measure all variants in each round, in an order that moves on by one, and return a series for each.

    :param warm_up: how many further rounds come first and are thrown away: connections, caches, compiled statements.
    """
    series = {name: Series(name) for name in variants}
    names = list(variants)
    for number in range(-warm_up, rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            sample = variants[name]()
            if number >= 0:
                series[name].samples.append(sample)
    return series
