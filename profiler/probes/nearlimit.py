"""Whether a step's peak left so little of the device that its memory is worth a look before it runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from llmtop.profiler.record.events import PhaseMemory
from llmtop.profiler.units import format_bytes

LEFT_SHARE = 0.03
"""Of the device: a peak that leaves less is near its limit."""
_ASK_FROM_SHARE = 0.75
"""Of the device that a process holds, or has allocated: below that the driver is not asked what is free.
Other processes may then fill the device all the same, which is theirs."""


class Room(NamedTuple):
    free_bytes: int
    """Of the device, by the driver: what other processes hold is not free."""
    total_bytes: int


class Narrow(NamedTuple):
    """A peak near the limit."""

    peak_bytes: int
    left_bytes: int
    total_bytes: int

    @property
    def words(self) -> str:
        return (
            f"a peak of {format_bytes(self.peak_bytes)} left {format_bytes(self.left_bytes)} of the device's"
            f" {format_bytes(self.total_bytes)}"
        )


def cuda_room(device: torch.device) -> Room:
    free, total = torch.cuda.mem_get_info(device)
    return Room(free, total)


class NearLimit:
    """Says it once in the life of a process."""

    def __init__(self, room: Callable[[], Room], total_bytes: int) -> None:
        """`room` asks the driver: some microseconds, for steps whose memory was read and is large."""
        self._room = room
        self._total_bytes = total_bytes
        self._done = False

    def look(self, phases: Mapping[str, PhaseMemory]) -> Narrow | None:
        """At what was read of a step. Its peak could have grown by what the allocator held beyond it, and by
        what the driver had left."""
        if self._done or not phases:
            return None
        peak = max(phase.peak_bytes or 0 for phase in phases.values())
        reserved = max(phase.reserved_bytes or 0 for phase in phases.values())
        if max(peak, reserved) < _ASK_FROM_SHARE * self._total_bytes:
            return None
        room = self._room()
        left = room.free_bytes + max(0, reserved - peak)
        if left >= LEFT_SHARE * room.total_bytes:
            return None
        self._done = True
        return Narrow(peak, left, room.total_bytes)


def near_limit_of(device: torch.device) -> NearLimit | None:
    """None on the CPU, whose memory is not one process's."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return NearLimit(lambda: cuda_room(device), total)
