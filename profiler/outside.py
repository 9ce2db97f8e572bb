"""What a device holds outside the peak of its rank's allocator, from readings at known moments of start-up.

Each part is a difference of two readings, so the parts add up, with the peak, to what NVML read.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.memory.result import Component
from llmtop.profiler.record.events import OutsideMeasured, OutsideMoment

_LATEST: tuple[OutsideMoment, ...] = ("end", "second_step", "first_step", "engine")


class Outside(Struct, frozen=True, kw_only=True):
    device_bytes: int | None
    """NVML's largest known reading of the device."""
    components: dict[Component, int]


def outside_peak_parts(rank: RankState, peak: int, reserved: int | None, sampled: int | None) -> Outside:
    """`reserved` is the most that the allocator held, `sampled` the largest of the sampler's readings."""
    found: dict[Component, int] = {}
    others = _others(rank)
    if others is not None:
        found[Component.OTHER_PROCESSES] = others
    if reserved is None:
        return Outside(device_bytes=sampled, components=found)
    found[Component.FRAGMENTATION] = reserved - peak
    held = {} if others is None else _held(rank, others)
    device = _largest_device(rank, reserved, others, held, sampled)
    if others is None or device is None:
        return Outside(device_bytes=device, components=found)
    rest = device - reserved - others
    own = _own(rank, held)
    if own is not None and rest > own:
        # More than the run ever held beside its allocator: others came in between two readings.
        found[Component.OTHER_PROCESSES] = others + rest - own
        rest = own
    if "context" in held:
        found[Component.CUDA_CONTEXT] = held["context"]
        rest -= held["context"]
        if "process_group" in held:
            found[Component.NCCL] = held["process_group"] - held["context"]
            rest -= found[Component.NCCL]
        found[Component.LOADED_KERNELS] = rest
    else:
        found[Component.CUDA_CONTEXT] = rest
    return Outside(device_bytes=device, components=found)


def _own(rank: RankState, held: dict[str, int]) -> int | None:
    """What this process held outside its allocator, by the driver's count of its processes.

    It only grows, so the latest reading is the largest. None where only the whole device is known.
    """
    return _latest(held) if _is_told_by_process(rank) else None


def _latest(held: dict[str, int]) -> int | None:
    return next((held[name] for name in _LATEST if name in held), None)


def _is_told_by_process(rank: RankState) -> bool:
    """One kind of reading serves all moments, or a difference would mean nothing."""
    return all(
        reading.process_used_bytes is not None
        for name, reading in rank.outside.items()
        if name != "untouched"
    )


def _others(rank: RankState) -> int | None:
    """Other processes and the driver's own reserve: what is used and not by this rank."""
    for reading in reversed(list(rank.outside.values())):
        if reading.device_used_bytes is not None and reading.process_used_bytes is not None:
            return reading.device_used_bytes - reading.process_used_bytes
    untouched = rank.outside.get("untouched")
    if untouched is not None and untouched.device_used_bytes is not None:
        return untouched.device_used_bytes
    return rank.baseline.device_used_before_bytes if rank.baseline else None


def _held(rank: RankState, others: int) -> dict[str, int]:
    """Moment to what this process held there outside its allocator."""
    readings = {name: reading for name, reading in rank.outside.items() if name != "untouched"}
    by_process = _is_told_by_process(rank)
    held: dict[str, int] = {}
    for name, reading in readings.items():
        used = _used(reading, others, by_process)
        if used is not None:
            held[name] = used - reading.reserved_bytes
    return held


def _used(reading: OutsideMeasured, others: int, by_process: bool) -> int | None:
    if by_process:
        return reading.process_used_bytes
    return None if reading.device_used_bytes is None else reading.device_used_bytes - others


def _largest_device(
    rank: RankState, reserved: int, others: int | None, held: dict[str, int], sampled: int | None
) -> int | None:
    """The sampler looks about once a second and may miss the largest use; the readings are exact."""
    latest = _latest(held)
    if latest is None or others is None:
        return sampled
    return max(sampled or 0, reserved + others + latest)
