"""Times of a step's phases: a clock on the CPU, CUDA events that are read when they have long passed."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from llmtop.profiler.record.events import Phase

PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")


class StepTimes(Protocol):
    """One step's times, to be read once the device has got there."""

    def step_seconds(self) -> float: ...

    def phase_seconds(self) -> dict[str, float | None]: ...


class PhaseTimer(Protocol):
    def start_step(self) -> None: ...

    def start(self, phase: Phase) -> None: ...

    def stop(self, phase: Phase) -> None: ...

    def finish_step(self) -> StepTimes: ...


def phase_timer(device: torch.device) -> PhaseTimer:
    return CudaPhaseTimer() if device.type == "cuda" else CpuPhaseTimer()


class _ClockTimes:
    def __init__(self, step: float, phases: dict[str, float | None]) -> None:
        self._step = step
        self._phases = phases

    def step_seconds(self) -> float:
        return self._step

    def phase_seconds(self) -> dict[str, float | None]:
        return self._phases


class CpuPhaseTimer:
    """On the CPU work is done when the call returns, so a clock is exact."""

    def __init__(self) -> None:
        self._step_began = 0.0
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float | None] = {}

    def start_step(self) -> None:
        self._seconds = {}
        self._step_began = time.perf_counter()

    def start(self, phase: Phase) -> None:
        self._began[phase] = time.perf_counter()

    def stop(self, phase: Phase) -> None:
        spent = time.perf_counter() - self._began.pop(phase)
        self._seconds[phase] = (self._seconds.get(phase) or 0.0) + spent

    def finish_step(self) -> StepTimes:
        return _ClockTimes(time.perf_counter() - self._step_began, self._seconds)


_EventPair = tuple[torch.cuda.Event, torch.cuda.Event]


class _EventTimes:
    def __init__(self, step: _EventPair, phases: dict[Phase, list[_EventPair]]) -> None:
        self._step = step
        self._phases = phases

    def step_seconds(self) -> float:
        return _elapsed_seconds(self._step)

    def phase_seconds(self) -> dict[str, float | None]:
        return {phase: sum(map(_elapsed_seconds, pairs)) for phase, pairs in self._phases.items()}


class CudaPhaseTimer:
    """Marks the current stream and never waits for it: the reader asks a step later.

    A phase's time is the device's: what the host does while the device is still busy costs nothing.
    """

    def __init__(self) -> None:
        self._step_began = _new_event()
        self._began: dict[Phase, torch.cuda.Event] = {}
        self._pairs: dict[Phase, list[_EventPair]] = {}

    def start_step(self) -> None:
        self._pairs = {}
        self._step_began = _recorded_event()

    def start(self, phase: Phase) -> None:
        self._began[phase] = _recorded_event()

    def stop(self, phase: Phase) -> None:
        self._pairs.setdefault(phase, []).append((self._began.pop(phase), _recorded_event()))

    def finish_step(self) -> StepTimes:
        return _EventTimes((self._step_began, _recorded_event()), self._pairs)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _recorded_event() -> torch.cuda.Event:
    event = _new_event()
    event.record()
    return event


def _elapsed_seconds(pair: _EventPair) -> float:
    milliseconds: float = pair[0].elapsed_time(pair[1])
    return milliseconds / 1000.0
