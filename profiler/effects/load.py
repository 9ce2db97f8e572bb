"""What others did on the machine while a run trained: two runs that met different load differ by that too."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.events import HardwareSampled
from llmtop.profiler.units import format_percent

UNLIKE_POINTS = 20.0
"""Of the machine's processors: below, what samples tell apart is mostly chance."""


def others_percent(state: RunState) -> float | None:
    """Share of all processors that was used by others than the ranks, the median of the newest samples.

    In percent of the whole machine; None where the record does not tell it, as one of an older version.
    """
    found = list(_shares(state))
    return median(found) if found else None


def load_words(own: float | None, other: float | None) -> str:
    """Where the load that two runs met is unlike; empty where it is not, or not known."""
    if own is None or other is None or abs(own - other) < UNLIKE_POINTS:
        return ""
    return (
        f"other programs used {format_percent(own, digits=0)} and {format_percent(other, digits=0)}"
        " of the processors"
    )


def _shares(state: RunState) -> Iterator[float]:
    began = state.series.times[0] if state.series.times else None
    ended = state.series.times[-1] if state.series.times else None
    for sample in state.hardware_history:
        # Between two steps: start-up loads weights and libraries, and the end frees what was held.
        if began is not None and ended is not None and began < sample.t <= ended:
            share = others_share(sample)
            if share is not None:
                yield share


def others_share(sample: HardwareSampled) -> float | None:
    """Of all processors, in percent, what others than the ranks used; None where the sample does not tell."""
    host = sample.host
    own = [process.cpu_percent for process in sample.processes]
    if host.cpu_percent is None or not host.cpu_count or not own or None in own:
        return None
    ranks = sum(used for used in own if used is not None) / host.cpu_count
    return max(0.0, host.cpu_percent - ranks)
