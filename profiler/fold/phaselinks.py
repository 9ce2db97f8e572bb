"""What the links carry in each phase of a step: samples of their rates, by the phase that was under way.

A sample is the mean rate since the sample before. It is counted for a phase only where nearly all of that
time lay inside the phase; where too few do, the sampling is too slow to tell, and that is what is said.
When a step ended is taken from the record of rank 0; its phases follow each other within it, once for each
micro-batch, and the optimizer comes last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

from msgspec import Struct

from llmtop.profiler.record.events import HardwareSampled, StepFinished
from llmtop.profiler.record.stepevents import BEFORE_FORWARD, BETWEEN

LINK_RATES = (
    "nvlink_tx_bytes_per_second",
    "nvlink_rx_bytes_per_second",
    "pcie_tx_bytes_per_second",
    "pcie_rx_bytes_per_second",
)
PURE_SHARE = 0.8
"""Of a sample's time that has to lie inside one phase."""
FEWEST_SAMPLES = 3
"""Of a phase, before its mean is told."""
_REPEATED = (*BEFORE_FORWARD, "forward", "backward")


class Stretch(NamedTuple):
    """A phase under way, by wall clock."""

    began: float
    ended: float
    phase: str


class PhaseRates(Struct, frozen=True, kw_only=True):
    phase: str
    samples: int
    rates: tuple[float | None, ...]
    """Means over the samples, of all devices together, in the order of `LINK_RATES`; None: cannot be told."""


class PhaseTraffic(Struct, frozen=True, kw_only=True):
    rows: tuple[PhaseRates, ...]
    sample_seconds: float | None
    """Between two samples."""
    longest_seconds: float | None
    """Of the stretches of the longest phase."""

    @property
    def tells(self) -> bool:
        return any(rate is not None for row in self.rows for rate in row.rates)


def stretches(step: StepFinished) -> Iterator[Stretch]:
    """The phases of one step as they followed each other."""
    end = step.t if step.ended is None else step.ended
    at = end - step.step_seconds
    rounds = max(1, step.grad_accum)
    for _ in range(rounds):
        for phase in _REPEATED:
            seconds = (step.phase_seconds.get(phase) or 0.0) / rounds
            yield Stretch(at, at + seconds, phase)
            at += seconds
    seconds = step.phase_seconds.get("optimizer") or 0.0
    yield Stretch(at, at + seconds, "optimizer")


def phase_traffic(history: Sequence[HardwareSampled], steps: Sequence[StepFinished]) -> PhaseTraffic:
    """By phase, over the steps that are given and the samples that fell into them."""
    known = sorted(stretch for step in steps for stretch in stretches(step) if stretch.ended > stretch.began)
    told = {stretch.phase for stretch in known}
    seen: dict[str, list[list[float | None]]] = {
        phase: [] for phase in (*_REPEATED, "optimizer") if phase != BETWEEN or phase in told
    }
    gaps = []
    for before, sample in zip(history, history[1:], strict=False):
        gaps.append(sample.t - before.t)
        phase = _under_way(known, before.t, sample.t)
        if phase is not None:
            seen[phase].append([_sum(sample, name) for name in LINK_RATES])
    longest: dict[str, list[float]] = {}
    for stretch in known:
        longest.setdefault(stretch.phase, []).append(stretch.ended - stretch.began)
    return PhaseTraffic(
        rows=tuple(PhaseRates(phase=p, samples=len(found), rates=_means(found)) for p, found in seen.items()),
        sample_seconds=median(gaps) if gaps else None,
        longest_seconds=max((median(all_) for all_ in longest.values()), default=None),
    )


def _under_way(known: Sequence[Stretch], began: float, ended: float) -> str | None:
    if ended <= began:
        return None
    inside: dict[str, float] = {}
    # They follow each other, so the first one that matters is at most one before.
    first = max(0, bisect_left(known, (began,)) - 1)
    for stretch in known[first : bisect_left(known, (ended,))]:
        both = min(ended, stretch.ended) - max(began, stretch.began)
        if both > 0:
            inside[stretch.phase] = inside.get(stretch.phase, 0.0) + both
    phase = max(inside, key=lambda name: inside[name], default=None)
    return phase if phase is not None and inside[phase] >= PURE_SHARE * (ended - began) else None


def _sum(sample: HardwareSampled, name: str) -> float | None:
    values = [value for value in (getattr(device, name) for device in sample.devices) if value is not None]
    return sum(values) if values else None


def _means(found: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    means: list[float | None] = []
    for column in range(len(LINK_RATES)):
        values = [value for row in found if (value := row[column]) is not None]
        means.append(fmean(values) if len(values) >= FEWEST_SAMPLES else None)
    return tuple(means)
