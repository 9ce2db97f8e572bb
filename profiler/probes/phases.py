"""Times of a step's phases: a clock on the CPU, CUDA events that are read when they have long passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from msgspec import Struct

from llmtop.profiler.probes.due import BORDERS_EVERY
from llmtop.profiler.record.events import Phase

PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")

Marks = tuple[Callable[[tuple[Phase, Any]], None], Callable[[], Any]]
"""What keeps a border, the phase that ends there and its mark; and what makes a mark: `stop` without its
frame."""
NO_MARKS: Marks = (deque[Any](maxlen=0).append, float)
"""Keeps nothing of a step whose borders are not marked."""


class StepTimes(Protocol):
    """One step's times, to be read once the device has got there."""

    def step_seconds(self) -> float: ...

    def phase_seconds(self) -> dict[str, float | None]: ...


class WholeStep:
    """Times of a step whose phases are not told, for other ranks do not tell them of it."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def step_seconds(self) -> float:
        return self._times.step_seconds()

    def phase_seconds(self) -> dict[str, float | None]:
        return {}


class PhaseTimer(Protocol):
    """A phase begins where the one before it ends, or the step: one mark a border."""

    borders_every: int
    """Of so many steps one is worth the marks of its borders."""

    def start_step(self) -> None: ...

    def go_on(self, apart: bool = False) -> None:
        """Instead of `start_step`, where no probe was at work since the last step ended.

        `apart`: what else was done since then is none of the first phase."""
        ...

    def start(self) -> None:
        """The phase that comes begins only now: what was done since the last mark is none of it."""
        ...

    def stop(self, phase: Phase) -> None: ...

    def marks(self) -> Marks:
        """Of whatever step is under way."""
        ...

    def finish_step(self) -> StepTimes: ...


def phase_timer(device: torch.device) -> PhaseTimer:
    return CudaPhaseTimer(device) if device.type == "cuda" else CpuPhaseTimer()


class _ClockTimes(Struct, frozen=True):
    """Worked out when it is asked for: at a border each line counts."""

    began: float
    borders: list[tuple[Phase | None, float]]
    ended: float

    def step_seconds(self) -> float:
        return self.ended - self.began

    def phase_seconds(self) -> dict[str, float | None]:
        seconds: dict[str, float | None] = {}
        before = self.began
        for phase, at in self.borders:
            if phase is not None:
                seconds[phase] = (seconds.get(phase) or 0.0) + at - before
            before = at
        return seconds


class CpuPhaseTimer:
    """On the CPU work is done when the call returns, so a clock is exact."""

    borders_every = 1

    def __init__(self) -> None:
        self._began = 0.0
        self._borders: list[tuple[Phase | None, float]] = []
        """Of this step, each with the phase that ended there; one list for all steps, for `marks`."""

    def start_step(self) -> None:
        self._borders.clear()
        self._began = perf_counter()

    def go_on(self, apart: bool = False) -> None:
        self._borders.clear()
        self._began = perf_counter()

    def start(self) -> None:
        self._borders.append((None, perf_counter()))

    def stop(self, phase: Phase) -> None:
        self._borders.append((phase, perf_counter()))

    def marks(self) -> Marks:
        return self._borders.append, perf_counter

    def finish_step(self) -> StepTimes:
        return _ClockTimes(self._began, self._borders[:], perf_counter())


_Event = torch._C._CudaEventBase
"""What `torch.cuda.Event` wraps: between two phases each frame of Python counts."""


class _StepEnd:
    """An event that two steps may read, given back as those of `_EventTimes` are."""

    __slots__ = ("event", "unused")

    def __init__(self, event: _Event, unused: list[_Event]) -> None:
        self.event = event
        self.unused = unused

    def __del__(self) -> None:
        self.unused.append(self.event)


class _EventTimes:
    """Gives the events of its borders back when nobody can read them any more, in whatever thread that is."""

    def __init__(
        self,
        began: _StepEnd,
        borders: list[tuple[Phase | None, _Event]],
        ended: _StepEnd,
        unused: list[_Event],
    ) -> None:
        self._began = began
        self._borders = borders
        self._ended = ended
        self._unused = unused

    def __del__(self) -> None:
        self._unused += [at for _, at in self._borders]

    def step_seconds(self) -> float:
        return _elapsed_seconds(self._began.event, self._ended.event)

    def phase_seconds(self) -> dict[str, float | None]:
        seconds: dict[str, float | None] = {}
        before = self._began.event
        for phase, at in self._borders:
            if phase is not None:
                seconds[phase] = (seconds.get(phase) or 0.0) + _elapsed_seconds(before, at)
            before = at
        return seconds


class CudaPhaseTimer:
    """Marks the current stream and never waits for it: the reader asks a step later.

    A phase's time is the device's: what the host does while the device is still busy costs nothing.
    An event is used again once its times were read: to make one takes as long as to record it.
    """

    borders_every = BORDERS_EVERY

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._raw_stream = torch._C._cuda_getCurrentRawStream(self._index)
        self._stream = torch.cuda.current_stream(self._index)
        self._unused: list[_Event] = []
        self._began = self._ended = _StepEnd(_new_event(), self._unused)
        self._borders: list[tuple[Phase | None, _Event]] = []
        """As of the clock."""
        self._failed: Exception | None = None
        """Of a mark: between the engine's calls it must end no training."""

    def start_step(self) -> None:
        self._borders.clear()
        # Asked for once a step, and by its handle: to make a stream's object costs more than to mark it.
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._raw_stream:
            self._raw_stream, self._stream = raw, torch.cuda.current_stream(self._index)
        self._began = _StepEnd(self._marked(), self._unused)

    def go_on(self, apart: bool = False) -> None:
        if torch._C._cuda_getCurrentRawStream(self._index) != self._raw_stream:
            self.start_step()
            return
        self._borders.clear()
        self._began = self._ended
        if apart:
            self.start()

    def start(self) -> None:
        self._borders.append((None, self._marked()))

    def stop(self, phase: Phase) -> None:
        self._borders.append((phase, self._marked()))

    def marks(self) -> Marks:
        return self._borders.append, self._marked

    def finish_step(self) -> StepTimes:
        """Raises what a mark of the step failed with."""
        self._ended = _StepEnd(self._marked(), self._unused)
        if self._failed is not None:
            raise self._failed
        return _EventTimes(self._began, self._borders[:], self._ended, self._unused)

    def _marked(self) -> _Event:
        unused = self._unused
        try:
            event = unused.pop() if unused else _new_event()
            event.record(self._stream)
        except Exception as error:  # noqa: BLE001 - raised again when the step is over
            self._failed = self._failed or error
            return self._began.event
        return event


def _new_event() -> _Event:
    return torch._C._CudaEventBase(enable_timing=True)


def _elapsed_seconds(began: _Event, ended: _Event) -> float:
    return began.elapsed_time(ended) / 1000.0
