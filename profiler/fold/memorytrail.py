"""Memory over the whole run, thinned: how much each device, each rank's process and the host held, and when;
and what others used meanwhile.

Samples are gathered in buckets of equal number, and of each bucket the largest reading is kept, so that a
peak is never thinned away. What is kept depends only on the samples, not on how they were cut into batches.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from llmtop.profiler.fold.othersuse import device_is_shared, others_share
from llmtop.profiler.record.deviceevents import LeftOutSamples
from llmtop.profiler.record.events import HardwareSampled

TRAIL_POINTS = 240
"""More are joined in pairs; as many as a wide terminal has columns."""


class TrailPoint(Struct, frozen=True, kw_only=True):
    """One bucket of samples: the largest readings in it."""

    t: float
    """Wall clock of its last sample."""
    devices: dict[int, int]
    """NVML index to bytes in use."""
    processes: dict[int, int]
    """Rank to the resident set of its process tree."""
    host_bytes: int | None = None
    """In use on the machine."""
    cgroup_bytes: int | None = None
    device_is_shared: bool = False
    """In one of the samples more than one process was on a device of the run."""
    others_percent: float | None = None
    """Of all processors, used by others than the ranks: the mean of the samples that tell it."""
    others_samples: int = 0
    """How many tell it."""


class MemoryTrail(Struct, frozen=True, kw_only=True):
    points: tuple[TrailPoint, ...] = ()
    samples: int = 0
    stride: int = 1
    """Samples in a bucket; the last one may hold fewer."""

    def of_device(self, index: int) -> tuple[int | None, ...]:
        return tuple(point.devices.get(index) for point in self.points)

    def of_process(self, rank: int) -> tuple[int | None, ...]:
        return tuple(point.processes.get(rank) for point in self.points)


class TrailBuilder:
    """Adds samples to a trail."""

    def __init__(self, trail: MemoryTrail) -> None:
        self._points = list(trail.points)
        self._samples, self._stride = trail.samples, trail.stride

    def add(self, event: HardwareSampled) -> None:
        if event.left_out is not None:
            self._add(_left_out_point(event.t, event.left_out), event.left_out.samples)
        self._add(point_of(event), 1)

    def _add(self, point: TrailPoint, samples: int) -> None:
        while samples > 0:
            inside = self._samples % self._stride
            if inside:
                self._points[-1] = _joined(self._points[-1], point)
            else:
                self._points.append(point)
            fitting = min(samples, self._stride - inside)
            self._samples += fitting
            samples -= fitting
            if len(self._points) > TRAIL_POINTS and self._samples % self._stride == 0:
                pairs = zip(self._points[::2], [*self._points[1::2], None], strict=False)
                self._points = [
                    first if second is None else _joined(first, second) for first, second in pairs
                ]
                self._stride *= 2

    def freeze(self) -> MemoryTrail:
        return MemoryTrail(points=tuple(self._points), samples=self._samples, stride=self._stride)


def point_of(event: HardwareSampled) -> TrailPoint:
    """One sample."""
    host, others = event.host, others_share(event)
    return TrailPoint(
        t=event.t,
        devices={d.index: d.memory_used_bytes for d in event.devices if d.memory_used_bytes is not None},
        processes={p.rank: p.rss_bytes for p in event.processes if p.rss_bytes is not None},
        host_bytes=host.memory_in_use_bytes,
        cgroup_bytes=host.cgroup_used_bytes,
        device_is_shared=device_is_shared(event),
        others_percent=others,
        others_samples=0 if others is None else 1,
    )


def _left_out_point(t: float, left_out: LeftOutSamples) -> TrailPoint:
    return TrailPoint(
        t=t,
        devices=left_out.device_bytes,
        processes=left_out.rss_bytes,
        host_bytes=left_out.host_bytes,
        cgroup_bytes=left_out.cgroup_bytes,
    )


def _joined(first: TrailPoint, second: TrailPoint) -> TrailPoint:
    return TrailPoint(
        t=second.t,
        devices=_largest(first.devices, second.devices),
        processes=_largest(first.processes, second.processes),
        host_bytes=max(_known(first.host_bytes, second.host_bytes), default=None),
        cgroup_bytes=max(_known(first.cgroup_bytes, second.cgroup_bytes), default=None),
        device_is_shared=first.device_is_shared or second.device_is_shared,
        others_percent=_mean_of_both(first, second),
        others_samples=first.others_samples + second.others_samples,
    )


def _mean_of_both(first: TrailPoint, second: TrailPoint) -> float | None:
    if first.others_percent is None or second.others_percent is None:
        return second.others_percent if first.others_percent is None else first.others_percent
    samples = first.others_samples + second.others_samples
    total = first.others_percent * first.others_samples + second.others_percent * second.others_samples
    return total / samples


def _known(*readings: int | None) -> Iterable[int]:
    return [reading for reading in readings if reading is not None]


def _largest(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    return {key: max(first.get(key, 0), second.get(key, 0)) for key in first.keys() | second.keys()}
