"""What is seen when no process of a run is left."""

from typing import Annotated

from msgspec import Struct

from llmtop.profiler.record.deviceevents import AFew
from llmtop.profiler.record.eventbase import Event

SLACK_BYTES = 64 << 20
"""A driver's own use of a device differs by less between two idle moments; a context alone takes more."""


class DeviceReturn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory in use on one GPU, by NVML. None: the driver did not tell."""

    index: int
    before_bytes: int | None = None
    """When the run's first ranks had been started and had taken nothing yet."""
    largest_bytes: int | None = None
    """Of all samples while ranks ran."""
    after_bytes: int | None = None
    """When no process was left, at the end of the wait."""
    holders: tuple[int, ...] = ()
    """Processes that have memory of it then, as the driver numbers them."""

    @property
    def is_back(self) -> bool | None:
        """Whether no more is in use than before the run; None where that is not known."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.after_bytes <= self.before_bytes + SLACK_BYTES


class MemoryReturned(Event, frozen=True, kw_only=True, tag="memory_returned"):
    """What the run's GPUs have in use once all its processes have ended."""

    devices: Annotated[tuple[DeviceReturn, ...], AFew]
    seconds: float
    """From the end of the last process until all of it was back, or until it was waited for no longer."""
