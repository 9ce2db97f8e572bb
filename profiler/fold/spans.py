"""What was measured on each setting of a run: the steps between one change and the next."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

from msgspec import Struct

from llmtop.profiler.fold import rankstate
from llmtop.profiler.fold.memorytrail import TrailPoint, point_of
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import Series, warm


class MeasuredSpan(Struct, frozen=True, kw_only=True):
    setting: int
    first_step: int
    last_step: int | None
    """None before the first step was finished."""
    step_seconds: float | None
    """Median, without the first steps and those in which kernels were recorded."""
    peak_bytes: int | None
    """The largest of any rank: allocated on a GPU, resident on the CPU kind."""
    device_is_shared: bool = False
    """While those steps were made more than one process was seen on a device of the run."""
    others_percent: float | None = None
    """Of all processors, used by others than the ranks meanwhile; the median."""


def measured_spans(state: RunState) -> tuple[MeasuredSpan, ...]:
    """In the order of the steps; the last one is of the setting in force."""
    spans = state.changes.spans
    ends = [span.first_step - 1 for span in spans[1:]]
    return tuple(_measured(state, number, end) for number, end in enumerate([*ends, None]))


def _measured(state: RunState, number: int, end: int | None) -> MeasuredSpan:
    setting, first = state.changes.spans[number].setting, state.changes.spans[number].first_step
    steps = list(_timed(state.span_series(number), end))
    meanwhile = _meanwhile(state, steps[0][0] - steps[0][1], steps[-1][0]) if steps else []
    others = [point.others_percent for point in meanwhile if point.others_percent is not None]
    return MeasuredSpan(
        setting=setting,
        first_step=first,
        last_step=_last(state, first, end),
        step_seconds=statistics.median(seconds for _, seconds in steps) if steps else None,
        peak_bytes=_peak(state, setting),
        device_is_shared=any(point.device_is_shared for point in meanwhile),
        others_percent=statistics.median(others) if others else None,
    )


def _last(state: RunState, first: int, end: int | None) -> int | None:
    last = state.steps_finished if end is None else min(end, state.steps_finished)
    return last if last >= first else None


def _timed(series: Series, end: int | None) -> Iterator[tuple[float, float]]:
    """When each step ended that the step time is taken from, and its seconds."""
    for at in warm(series, WARMUP_STEPS):
        # What was made after the end is lost.
        if not series.profiled[at] and (end is None or series.steps[at] <= end):
            yield series.times[at], series.step_seconds[at]


def _meanwhile(state: RunState, began: float, ended: float) -> list[TrailPoint]:
    """The samples of that time; of what is older than those that are kept, the buckets wholly within it."""
    history = state.hardware_history
    if history and (len(history) == state.hardware_samples or history[0].t <= began):
        return [point_of(sample) for sample in history if began < sample.t <= ended]
    buckets = pairwise(state.memory_trail.points)
    return [point for before, point in buckets if before.t >= began and point.t <= ended]


def _peak(state: RunState, setting: int) -> int | None:
    known = [rankstate.peaks_so_far(rank).get(setting) for rank in state.ranks.values()]
    return max((peak for peak in known if peak is not None), default=None)
