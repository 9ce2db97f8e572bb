"""The few statistics that the benchmarks print: times, percentiles, bootstrap intervals."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct

BOOTSTRAPS = 4000


class Interval(Struct, frozen=True, kw_only=True):
    """A figure with the range that it lies in at 95 % confidence."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


class BlockTime(Struct, frozen=True, kw_only=True):
    """Seconds a step of one block."""

    wall: float
    cpu: float
    """Processor time of all threads: on a machine with other work the steadier of the two."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def bootstrap(
    values: Sequence[float],
    figure: Callable[[Sequence[float]], float] = statistics.fmean,
    *,
    seed: int = 0,
    rounds: int = BOOTSTRAPS,
) -> Interval:
    """`figure` of the values with its percentile bootstrap interval."""
    draw = random.Random(seed)
    drawn = sorted(figure(draw.choices(values, k=len(values))) for _ in range(rounds))
    return Interval(
        value=figure(values), low=drawn[int(0.025 * rounds)], high=drawn[min(rounds - 1, int(0.975 * rounds))]
    )
