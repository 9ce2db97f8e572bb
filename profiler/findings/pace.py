"""How fast the ranks are and what they do with their time: what several rules ask for."""

from __future__ import annotations

from statistics import fmean, median

from llmtop.profiler.findings.finding import STEADY_STEPS, Seen
from llmtop.profiler.fold.rankstate import WARMUP_STEPS, RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import steady_steps
from llmtop.profiler.record.deviceevents import DeviceSample

STEADY_SAMPLES = 10
"""Samples after the first steps, before anything is said about what devices do meanwhile."""


def step_seconds(seen: Seen) -> float | None:
    """The usual step after warm-up; None where too few are known."""
    steps = [seconds for seconds, _ in steady_steps(seen.state.speed_series, WARMUP_STEPS)]
    return median(steps) if len(steps) >= STEADY_STEPS else None


def mean_phases(rank: RankState | None, steps: int = STEADY_STEPS) -> dict[str, float]:
    """Seconds of each phase in a step after warm-up."""
    return {
        phase: total.seconds / total.steps
        for phase, total in (rank.phase_totals.items() if rank is not None else ())
        if total.steps >= steps
    }


def steady_devices(state: RunState) -> list[DeviceSample]:
    """Readings of all devices since the end of warm-up; none where there are too few samples."""
    steps, times = state.series.steps, state.series.times
    began = next((t for n, t in zip(steps, times, strict=True) if n >= steps[0] + WARMUP_STEPS), None)
    shown = [sample for sample in state.hardware_history if began is not None and sample.t > began]
    if len(shown) < STEADY_SAMPLES:
        return []
    return [device for sample in shown for device in sample.devices]


def mean_of(devices: list[DeviceSample], name: str) -> float | None:
    """Of one reading over all samples; None where no device gives it."""
    known = [value for value in (getattr(device, name) for device in devices) if value is not None]
    return fmean(known) if known else None
