"""What others did on the machine while a run trained: two runs that met different load differ by that too."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from llmtop.profiler.fold.othersuse import others_share
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.units import format_percent

UNLIKE_POINTS = 20.0
"""Of the machine's processors: below, what samples tell apart is mostly chance."""
UNLIKE_REST = 1.5
"""What others left of them, the one to the other: where they use most, a few points are much of the rest."""
_LEAST_POINTS = 5.0


def others_percent(state: RunState) -> float | None:
    """Share of all processors that was used by others than the ranks, the median of the newest samples.

    In percent of the whole machine; None where the record does not tell it, as one of an older version.
    """
    found = list(_shares(state))
    return median(found) if found else None


def load_words(own: float | None, other: float | None) -> str:
    """Where the load that two runs met is unlike; empty where it is not, or not known."""
    if own is None or other is None or not _is_unlike(own, other):
        return ""
    return (
        f"other programs used {format_percent(own, digits=0)} and {format_percent(other, digits=0)}"
        " of the processors"
    )


def _is_unlike(own: float, other: float) -> bool:
    points, less = abs(own - other), min(100.0 - own, 100.0 - other)
    return points >= UNLIKE_POINTS or (points >= _LEAST_POINTS and points >= (UNLIKE_REST - 1) * less)


def _shares(state: RunState) -> Iterator[float]:
    began = state.series.times[0] if state.series.times else None
    ended = state.series.times[-1] if state.series.times else None
    for sample in state.hardware_history:
        # Between two steps: start-up loads weights and libraries, and the end frees what was held.
        if began is not None and ended is not None and began < sample.t <= ended:
            share = others_share(sample)
            if share is not None:
                yield share
