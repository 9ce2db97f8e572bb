"""When the host's memory will be full, from how it has grown lately, with how sure that is.

A straight line through the readings of the last minutes. Its slope has an error, and readings that follow
one another are alike, so the error is widened by how alike they are. Where the slope may be nothing at all
no time is told: memory that goes up and down with the steps is no growth, nor is what grew in one half of the
time alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from msgspec import Struct

from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.record.events import HardwareSampled

SETTLE_STEPS = WARMUP_STEPS + 3
"""Caches of data, pinned buffers and freed memory fill up in the first steps; that is no leak."""
FEWEST_SAMPLES = 30
SHORTEST_SECONDS = 45.0
"""Less says little about minutes to come."""
SURE = 3.0
"""Standard errors: a slope nearer to zero than this is called none."""
STEADY_SHARE = 0.6
"""Of the slope of the steeper half of the samples, the least that the other half's must have: what comes in
one jump or levels off was somebody's start."""
FLOOR_BYTES_PER_SECOND = 64 * 1024
"""Slower growth takes days to fill a machine, and is as likely the page tables of somebody else."""
_MOST_ALIKE = 0.98


class Slope(Struct, frozen=True, kw_only=True):
    per_second: float
    error: float
    """One standard error."""


class Forecast(Struct, frozen=True, kw_only=True):
    """Of the limit that is nearer in time; all figures are of now."""

    limit: str
    """`cgroup` or `machine`."""
    used_bytes: int
    limit_bytes: int
    slope: Slope
    seconds: float | None = None
    """Until the limit; None: it does not grow as far as can be told."""
    earliest_seconds: float | None = None
    latest_seconds: float | None = None


def slope_of(times: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Of the line through them; None where there are too few, or over too short a time."""
    if len(times) < FEWEST_SAMPLES or times[-1] - times[0] < SHORTEST_SECONDS:
        return None
    middle, level = fmean(times), fmean(values)
    across = sum((t - middle) ** 2 for t in times)
    slope = _per_second(times, values)
    if slope is None:
        return None
    rest = [v - level - slope * (t - middle) for t, v in zip(times, values, strict=True)]
    square = sum(r * r for r in rest)
    if square <= 0:
        return Slope(per_second=slope, error=0.0)
    alike = sum(a * b for a, b in zip(rest, rest[1:], strict=False)) / square
    alike = min(max(alike, 0.0), _MOST_ALIKE)
    error = sqrt(square / (len(times) - 2) / across) * sqrt((1 + alike) / (1 - alike))
    return Slope(per_second=slope, error=error)


def is_steady(times: Sequence[float], values: Sequence[float]) -> bool:
    """Whether both halves of the time grow, about as fast as one another."""
    half = len(times) // 2
    both = (_per_second(times[:half], values[:half]), _per_second(times[half:], values[half:]))
    known = [slope for slope in both if slope is not None]
    return len(known) == len(both) and min(known) > 0 and min(known) >= STEADY_SHARE * max(known)


def _per_second(times: Sequence[float], values: Sequence[float]) -> float | None:
    """Of the line of least squares; None where all is of one moment."""
    middle, level = fmean(times), fmean(values)
    across = sum((t - middle) ** 2 for t in times)
    if across <= 0:
        return None
    return sum((t - middle) * (v - level) for t, v in zip(times, values, strict=True)) / across


def forecast(history: Sequence[HardwareSampled], since: float | None) -> Forecast | None:
    """From the samples after `since`, before which a run fills memory as it should; None: too few yet."""
    shown = [sample for sample in history if since is not None and sample.t > since]
    found = [one for one in (_of_cgroup(shown), _of_machine(shown)) if one is not None]
    return min(found, key=_nearness, default=None)


def _nearness(one: Forecast) -> tuple[bool, float, float]:
    """What fills up first, and of what does not the fuller."""
    return one.seconds is None, one.seconds or 0.0, -one.used_bytes / one.limit_bytes


def _of_cgroup(shown: Sequence[HardwareSampled]) -> Forecast | None:
    limit = shown[-1].host.cgroup_limit_bytes if shown else None
    points = [(s.t, s.host.cgroup_used_bytes) for s in shown if s.host.cgroup_used_bytes is not None]
    return _toward("cgroup", limit, points)


def _of_machine(shown: Sequence[HardwareSampled]) -> Forecast | None:
    total = shown[-1].host.memory_total_bytes if shown else None
    points = [(s.t, used) for s in shown if (used := s.host.memory_in_use_bytes) is not None]
    return _toward("machine", total, points)


def _toward(name: str, limit: int | None, points: Sequence[tuple[float, int]]) -> Forecast | None:
    times, values = [t for t, _ in points], [float(used) for _, used in points]
    slope = slope_of(times, values)
    if slope is None or not limit:
        return None
    used = points[-1][1]
    plain = Forecast(limit=name, used_bytes=used, limit_bytes=limit, slope=slope)
    least = slope.per_second - SURE * slope.error
    if slope.per_second < FLOOR_BYTES_PER_SECOND or least <= 0 or not is_steady(times, values):
        return plain
    left = max(0, limit - used)
    return Forecast(
        limit=name,
        used_bytes=used,
        limit_bytes=limit,
        slope=slope,
        seconds=left / slope.per_second,
        earliest_seconds=left / (slope.per_second + 2 * slope.error),
        latest_seconds=left / max(slope.per_second - 2 * slope.error, least),
    )
