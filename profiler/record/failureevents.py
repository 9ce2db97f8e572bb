"""Memory that ran out, or is about to: an allocation that failed, and host memory that fills up."""

from typing import Literal

from msgspec import Struct

from llmtop.profiler.record.eventbase import Event


class DeviceUse(Struct, frozen=True, kw_only=True):
    """One process on the device, as the allocator's message lists it."""

    pid: int
    """As the driver numbers it, which inside a container is not the container's number."""
    used_bytes: int


class MemoryShortage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One failed allocation. What the message does not tell is None; printed figures are rounded."""

    requested_bytes: int | None = None
    resolution_bytes: int = 1
    """The request lies within half of this of `requested_bytes`: one unit of the last printed digit."""
    on_host: bool = False
    """Host memory was refused; else the device's."""
    device: int | None = None
    """As CUDA numbers those that the process sees."""
    total_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    """Of the device by the rank's process, what lies outside the allocator included."""
    allowed_bytes: int | None = None
    """That the process may use, where it was set less than all."""
    allocated_bytes: int | None = None
    """In tensors, by the rank's allocator."""
    cached_bytes: int | None = None
    """Held by that allocator and not in tensors: its free pieces were too small or of another kind."""
    processes: tuple[DeviceUse, ...] = ()
    """The others on the device, as far as they are listed."""


Action = Literal["warned", "save_asked", "no_room"]
"""`save_asked`: near enough that the ranks were asked for a checkpoint; `no_room`: they would have been, and
there is no room for one."""


class HostMemoryRunsOut(Event, frozen=True, kw_only=True, tag="host_memory_runs_out"):
    """Host memory grows, and is forecast to be full before the run has ended."""

    limit: str
    """`cgroup` or `machine`."""
    used_bytes: int
    limit_bytes: int
    bytes_per_second: float
    seconds: float
    """Until it is full, by the slope of the last minutes."""
    action: Action = "warned"
    reason: str = ""
    """Why there is no room."""


class StepHealed(Event, frozen=True, kw_only=True, tag="step_healed"):
    """A rank trains on a step's batch again in smaller parts, as its memory or another rank's ran out."""

    step: int
    micro_batch: int
    """From here on."""
    grad_accum: int
    stage: str | None = None
    """Phase in which this rank's memory ran out; None where it was another's."""
    where: str = ""
    message: str = ""
    shortage: MemoryShortage | None = None
