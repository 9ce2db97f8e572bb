"""The steady part of a short run, measured alike in every kind of run."""

from __future__ import annotations

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.rundir import RunDir


def first_and_last(steps: int) -> tuple[int, int]:
    """The window begins when the first of these steps is done and ends when the second is.

    A third of the steps, and four at least, is warm-up: the worker looks closely at its first three. The
    last step does not count: the worker reports a step when the next one has been handed to the device, and
    the last one at once.
    """
    return max(4, steps // 3), steps - 1


def tokens_per_second(run: RunDir) -> float | None:
    """Of the whole job in that window; None when the run did not get through it."""
    first, last = first_and_last(run.spec().options.steps)
    done = {
        event.step: event for event in EventTail(run.events_path(0)).poll() if isinstance(event, StepFinished)
    }
    if first not in done or last not in done or done[last].m <= done[first].m:
        return None
    return done[last].tokens * (last - first) / (done[last].m - done[first].m)
