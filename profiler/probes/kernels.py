"""Which kernels one micro-batch ran: torch's profiler over it, down to a name, a time and a count.

CUPTI costs about a second to start and some device memory while it is on, so this runs once in a run.
It asks for the device's side alone on a GPU (names suffice, and no operator is recorded) and for operators
on the CPU, where they are all there is. No stacks, no shapes, no tree of events is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llmtop.profiler.record.events import KernelTime

_BILLION = 1e9


class ProfiledEvent(Protocol):
    """What is read of one of the profiler's records (torch's `_KinetoEvent`)."""

    def name(self) -> str: ...

    def device_type(self) -> DeviceType: ...

    def start_thread_id(self) -> int: ...

    def start_ns(self) -> int: ...

    def duration_ns(self) -> int: ...


def profiled_step(
    asked: int, first_step: int, last_step: int, classified: Callable[[int], bool]
) -> int | None:
    """The step whose kernels are recorded: nearest to the one asked for, and not one that is classified."""
    if asked == 0 or last_step < first_step:
        return None
    wanted = min(first_step - 1 + asked, last_step)
    later, earlier = range(wanted, last_step + 1), range(wanted - 1, first_step - 1, -1)
    return next((step for step in (*later, *earlier) if not classified(step)), None)


class KernelRecorder:
    """One recording: `start`, run the micro-batch, `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._profile: Any = None

    @property
    def running(self) -> bool:
        return self._profile is not None

    def start(self) -> None:
        if not self._on_cpu:
            # Kineto then takes CUPTI out of the process after the recording: else every later launch pays.
            os.environ.setdefault("TEARDOWN_CUPTI", "1")
        activity = ProfilerActivity.CPU if self._on_cpu else ProfilerActivity.CUDA
        recording = profile(activities=[activity])
        recording.start()
        self._profile = recording

    def stop(self) -> tuple[KernelTime, ...]:
        """Every kernel (on the CPU: operator) that ran, the longest first. Waits for the device."""
        recording, self._profile = self._profile, None
        recording.stop()
        return collect(recording.profiler.kineto_results.events(), on_cpu=self._on_cpu)


def collect(events: Iterable[ProfiledEvent], *, on_cpu: bool) -> tuple[KernelTime, ...]:
    """Records of the same name put together: kernels of the device where there is one, else operators."""
    wanted = DeviceType.CPU if on_cpu else DeviceType.CUDA
    chosen = [event for event in events if event.device_type() == wanted]
    spent = _own_nanoseconds(chosen) if on_cpu else [event.duration_ns() for event in chosen]
    sums: dict[str, tuple[int, int]] = {}
    for event, nanoseconds in zip(chosen, spent, strict=True):
        so_far, calls = sums.get(event.name(), (0, 0))
        sums[event.name()] = (so_far + nanoseconds, calls + 1)
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return tuple(KernelTime(name=name, seconds=ns / _BILLION, calls=calls) for name, (ns, calls) in ordered)


def _own_nanoseconds(events: list[ProfiledEvent]) -> list[int]:
    """Of each operator without those that it called on its thread: operators nest, kernels do not."""
    own = [event.duration_ns() for event in events]
    order = sorted(
        range(len(events)), key=lambda at: (events[at].start_thread_id(), events[at].start_ns(), -own[at])
    )
    callers: list[int] = []
    for at in order:
        event = events[at]
        while callers and not _within(event, events[callers[-1]]):
            callers.pop()
        if callers:
            own[callers[-1]] -= event.duration_ns()
        callers.append(at)
    return [max(0, nanoseconds) for nanoseconds in own]


def _within(event: ProfiledEvent, caller: ProfiledEvent) -> bool:
    same_thread = event.start_thread_id() == caller.start_thread_id()
    return same_thread and event.start_ns() < caller.start_ns() + caller.duration_ns()
