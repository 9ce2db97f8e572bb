"""What was measured on each setting of a run: the steps between one change and the next."""

from __future__ import annotations

import statistics

from msgspec import Struct

from llmtop.profiler.fold import rankstate
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import RunState


class MeasuredSpan(Struct, frozen=True, kw_only=True):
    setting: int
    first_step: int
    last_step: int | None
    """None before the first step was finished."""
    step_seconds: float | None
    """Median, without the first steps and those in which kernels were recorded."""
    peak_bytes: int | None
    """The largest of any rank: allocated on a GPU, resident on the CPU kind."""


def measured_spans(state: RunState) -> tuple[MeasuredSpan, ...]:
    """In the order of the steps; the last one is of the setting in force."""
    spans = state.changes.spans
    ends = [span.first_step - 1 for span in spans[1:]]
    return tuple(
        MeasuredSpan(
            setting=span.setting,
            first_step=span.first_step,
            last_step=_last(state, span.first_step, end),
            step_seconds=_median_seconds(state, span.first_step, end),
            peak_bytes=_peak(state, span.setting),
        )
        for span, end in zip(spans, [*ends, None], strict=True)
    )


def _last(state: RunState, first: int, end: int | None) -> int | None:
    last = state.steps_finished if end is None else min(end, state.steps_finished)
    return last if last >= first else None


def _median_seconds(state: RunState, first: int, end: int | None) -> float | None:
    series = state.setting_series if end is None else state.series
    seconds = [
        seconds
        for step, seconds, profiled in zip(series.steps, series.step_seconds, series.profiled, strict=True)
        if step >= first + WARMUP_STEPS and (end is None or step <= end) and not profiled
    ]
    return statistics.median(seconds) if seconds else None


def _peak(state: RunState, setting: int) -> int | None:
    known = [rankstate.peaks_so_far(rank).get(setting) for rank in state.ranks.values()]
    return max((peak for peak in known if peak is not None), default=None)
