"""Adds up the steps and samples that a thinned log leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from llmtop.profiler.record.deviceevents import LeftOutSamples
from llmtop.profiler.record.events import HardwareSampled
from llmtop.profiler.record.stepevents import LeftOutSteps, PhaseMemory, StepFinished

_Key = TypeVar("_Key")
Peaks = dict[str, PhaseMemory]


def with_step(known: LeftOutSteps | None, step: StepFinished) -> LeftOutSteps:
    """`known` and a step before it that is left out as well, with those that it stands for itself."""
    one = LeftOutSteps(
        steps=1,
        tokens=step.tokens,
        skipped=int(step.skipped),
        nonfinite=int(step.loss is None),
        first_nonfinite_step=step.step if step.loss is None else None,
        phase_seconds={phase: (spent, 1) for phase, spent in step.phase_seconds.items() if spent is not None},
        peaks=step.phase_memory,
        peaks_in_use=step.phase_memory if step.in_use_only else {},
    )
    found = one if step.left_out is None else _steps(step.left_out, one)
    return found if known is None else _steps(found, known)


def _steps(first: LeftOutSteps, second: LeftOutSteps) -> LeftOutSteps:
    """The first ones came first."""
    seconds = dict(first.phase_seconds)
    for phase, (spent, count) in second.phase_seconds.items():
        before = seconds.get(phase, (0.0, 0))
        seconds[phase] = (before[0] + spent, before[1] + count)
    at = first.first_nonfinite_step
    return LeftOutSteps(
        steps=first.steps + second.steps,
        tokens=first.tokens + second.tokens,
        skipped=first.skipped + second.skipped,
        nonfinite=first.nonfinite + second.nonfinite,
        first_nonfinite_step=at if at is not None else second.first_nonfinite_step,
        phase_seconds=seconds,
        peaks=_peaks(first.peaks, second.peaks),
        peaks_in_use=_peaks(first.peaks_in_use, second.peaks_in_use),
    )


def _peaks(first: Peaks, second: Peaks) -> Peaks:
    joined = dict(first)
    for phase, memory in second.items():
        known = joined.get(phase)
        joined[phase] = (
            memory
            if known is None
            else PhaseMemory(
                allocated_bytes=_larger(known.allocated_bytes, memory.allocated_bytes),
                peak_bytes=_larger(known.peak_bytes, memory.peak_bytes),
                reserved_bytes=_larger(known.reserved_bytes, memory.reserved_bytes),
            )
        )
    return joined


def with_sample(known: LeftOutSamples | None, sample: HardwareSampled) -> LeftOutSamples:
    """`known` and a sample before it that is left out as well, with those that it stands for itself."""
    devices, processes, host = sample.devices, sample.processes, sample.host
    one = LeftOutSamples(
        samples=1,
        throttled={
            device.index: dict.fromkeys(device.throttle_reasons, 1)
            for device in devices
            if device.throttle_reasons
        },
        device_bytes=_read((device.index, device.memory_used_bytes) for device in devices),
        rss_bytes=_read((process.rank, process.own_rss_bytes) for process in processes),
        pss_bytes=_read((process.rank, process.own_pss_bytes) for process in processes),
        compiler_bytes=_read((process.rank, process.compiler_rss_bytes or None) for process in processes),
        host_bytes=host.memory_in_use_bytes,
        cgroup_bytes=host.cgroup_used_bytes,
        swap_bytes=host.swap_used_bytes,
        lost=tuple(device.index for device in devices if device.is_lost),
    )
    found = one if sample.left_out is None else _samples(sample.left_out, one)
    return found if known is None else _samples(found, known)


def _samples(first: LeftOutSamples, second: LeftOutSamples) -> LeftOutSamples:
    throttled = {index: dict(reasons) for index, reasons in first.throttled.items()}
    for index, reasons in second.throttled.items():
        counts = throttled.setdefault(index, {})
        for reason, count in reasons.items():
            counts[reason] = counts.get(reason, 0) + count
    return LeftOutSamples(
        samples=first.samples + second.samples,
        throttled=throttled,
        device_bytes=_largest(first.device_bytes, second.device_bytes),
        rss_bytes=_largest(first.rss_bytes, second.rss_bytes),
        pss_bytes=_largest(first.pss_bytes, second.pss_bytes),
        compiler_bytes=_largest(first.compiler_bytes, second.compiler_bytes),
        host_bytes=_larger(first.host_bytes, second.host_bytes),
        cgroup_bytes=_larger(first.cgroup_bytes, second.cgroup_bytes),
        swap_bytes=_larger(first.swap_bytes, second.swap_bytes),
        lost=tuple(sorted({*first.lost, *second.lost})),
    )


def _read(readings: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    return {key: value for key, value in readings if value is not None}


def _largest(first: Mapping[_Key, int], second: Mapping[_Key, int]) -> dict[_Key, int]:
    return {key: max(first.get(key, 0), second.get(key, 0)) for key in first.keys() | second.keys()}


def _larger(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return max(first, second)
