"""What the links carried over the course of one step: many steps laid over each other.

Each sample is the mean rate since the sample before. It is laid where it fell within its step, so that what
ZeRO-3 gathers before each layer shows under forward and backward, and what is reduced under backward alone.
Only samples that are short beside a step count, and only steps that took about as long as the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from llmtop.profiler.fold.phaselinks import LINK_RATES, Stretch, stretches
from llmtop.profiler.record.events import HardwareSampled, StepFinished

LONGEST_SHARE = 1 / 6
"""Of a step, for a sample that is to tell where in it something was carried."""
FEWEST_SAMPLES = 12
_ALIKE = 0.25
"""How far a step's time may be from the middle one, as a share of it."""


class StepProfile(Struct, frozen=True, kw_only=True):
    stretches: tuple[Stretch, ...]
    """The phases of the newest step; seconds from its beginning."""
    step_seconds: float
    steps: int
    samples: int
    rates: dict[str, tuple[float | None, ...]]
    """By name in `LINK_RATES`: means of all devices together in equal parts of a step, from its beginning.
    None: no sample fell there, or none told."""


class _Column:
    """A mean weighted by time."""

    def __init__(self) -> None:
        self.sum = self.seconds = 0.0

    def add(self, rate: float, seconds: float) -> None:
        self.sum += rate * seconds
        self.seconds += seconds

    @property
    def mean(self) -> float | None:
        return self.sum / self.seconds if self.seconds else None


def step_profile(
    history: Sequence[HardwareSampled], steps: Sequence[StepFinished], columns: int
) -> StepProfile | None:
    """In `columns` equal parts of a step; None where too few samples are short enough."""
    alike = _alike([step for step in steps if not step.profiled and step.step_seconds > 0])
    if not alike or columns <= 0:
        return None
    ends = [_end(step) for step in alike]
    table = {name: [_Column() for _ in range(columns)] for name in LINK_RATES}
    used, counted = 0, set[int]()
    for before, sample in zip(history, history[1:], strict=False):
        # Of the steps, the one that the sample's middle lies in.
        at = bisect_right(ends, (before.t + sample.t) / 2)
        if at == len(alike):
            continue
        step, began = alike[at], ends[at] - alike[at].step_seconds
        first, last = before.t - began, sample.t - began
        if first < 0 or not 0 < last - first <= LONGEST_SHARE * step.step_seconds:
            continue
        used += 1
        counted.add(at)
        _lay(table, sample, first / step.step_seconds, last / step.step_seconds, columns)
    if used < FEWEST_SAMPLES:
        return None
    # Not every step tells its phases.
    newest = next((step for step in reversed(alike) if step.phase_seconds), alike[-1])
    began = _end(newest) - newest.step_seconds
    return StepProfile(
        stretches=tuple(Stretch(s.began - began, s.ended - began, s.phase) for s in stretches(newest)),
        step_seconds=newest.step_seconds,
        steps=len(counted),
        samples=used,
        rates={name: tuple(column.mean for column in parts) for name, parts in table.items()},
    )


def _alike(steps: Sequence[StepFinished]) -> list[StepFinished]:
    if not steps:
        return []
    middle = median(step.step_seconds for step in steps)
    return [step for step in steps if abs(step.step_seconds - middle) <= _ALIKE * middle]


def _end(step: StepFinished) -> float:
    return step.t if step.ended is None else step.ended


def _lay(
    table: dict[str, list[_Column]], sample: HardwareSampled, first: float, last: float, columns: int
) -> None:
    """A sample over the parts of a step that it covers; `first` and `last` are shares of the step."""
    for name, parts in table.items():
        known = [rate for device in sample.devices if (rate := getattr(device, name)) is not None]
        if not known:
            continue
        rate = sum(known)
        for column in range(int(first * columns), min(columns, int(last * columns) + 1)):
            overlap = min(last, (column + 1) / columns) - max(first, column / columns)
            if overlap > 0:
                parts[column].add(rate, overlap)
