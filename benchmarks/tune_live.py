"""A sweep in few processes: `benchmarks.tune --sweep NAME --live`.

What takes a relaunch (ZeRO stage, attention, Liger) has a run for each of its combinations; micro-batch and
checkpointing are changed between two steps of that run, as `llmtop set` does. So a setting costs about five
steps, where a run of its own costs the start of a model besides. The record holds a step back for up to a
second: the next change is asked for when enough steps must have been made, seen or not, and what counts is
what the record says afterwards.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Generator, Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import JobFailedError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import Change, changed
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.tune.space import CHECKPOINTING, Candidate, key_of
from llmtop.trainer.tune.trial import (
    BEHIND,
    LEAST_INTERVALS,
    SKIPPED_STEPS,
    Start,
    end_run,
    error_of,
    trial_spec,
)

LIVE_KNOBS = ("micro_batch", CHECKPOINTING)
_STEPS = 10**6
_SETTLED = 1
"""Steps of a setting before its window: the first takes its memory anew."""
_ENOUGH = 2
"""Intervals after which the next change is asked for: it comes one or two steps later, and they count too."""
_PATIENCE_SECONDS = 90.0
_POLL_SECONDS = 0.05


class Live(Struct, frozen=True, kw_only=True):
    """What one setting of a live run came to."""

    outcome: str
    reason: str = ""
    step_seconds: float | None = None
    spread_seconds: float | None = None
    error_seconds: float | None = None
    steps_measured: int = 0
    at_start: bool = False
    """The run was launched with it; else it was changed to it."""
    wall_seconds: float = 0.0


def in_runs(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Those that one run can be changed to, together; in the order that they have."""
    runs: dict[str, list[Candidate]] = {}
    for one in candidates:
        fixed = key_of({key: value for key, value in one.choice.items() if key not in LIVE_KNOBS})
        runs.setdefault(fixed, []).append(one)
    return list(runs.values())


class Steps:
    """The steps of a run and its state, read as they are written."""

    def __init__(self, run: RunDir) -> None:
        self._reader = RunReader(run)
        self._tail = EventTail(run.events_path(0))
        self.ends: dict[int, float] = {}
        """Step to when it ended, wall clock."""
        self.poll()

    def poll(self) -> None:
        self.state = self._reader.poll()
        for event in self._tail.poll():
            if isinstance(event, StepFinished):
                self.ends[event.step] = event.ended if event.ended is not None else event.t

    def wait(self, deadline: float) -> bool:
        """One poll, a moment later; whether the run goes on and there is time."""
        time.sleep(_POLL_SECONDS)
        self.poll()
        return self.state.status not in ENDED and time.monotonic() < deadline

    def intervals(self, first: int, before: int | None = None) -> list[float]:
        """Seconds of the steps after `first` that are seen to have ended; those that end before step `before`
        begins, without the last of them.

        On a GPU the record tells a step one step later. The last before a change is told at once, so the time
        from the one before it would come out near zero.
        """
        last = max(self.ends, default=0) + 1 if before is None else before - 1
        known = [step for step in range(first + 1, last) if step in self.ends and step - 1 in self.ends]
        return [self.ends[step] - self.ends[step - 1] for step in known]

    def must_be_made(self, first: int) -> float:
        """Intervals after the end of step `first` that must be over by now, seen or not."""
        seen = self.intervals(first)
        if not seen:
            return 0.0
        return len(seen) + (time.time() - max(self.ends.values())) / statistics.fmean(seen)


class LiveRun:
    """One run that is changed from setting to setting."""

    def __init__(self, run: RunDir, began: float) -> None:
        self._run = run
        self._steps = Steps(run)
        self._first = SKIPPED_STEPS
        """The step at whose end the window of the setting in force begins."""
        self._at_start = True
        self._began = began

    @property
    def ended(self) -> bool:
        return self._steps.state.status in ENDED

    def wait_for_enough(self, best: float | None) -> None:
        """Until enough of its steps must have been made, or it is seen to be far behind, or to be over."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._steps.must_be_made(self._first) < _ENOUGH:
            seen = self._steps.intervals(self._first)
            if seen and best is not None and min(seen) > BEHIND * best:
                return
            if not self._steps.wait(deadline):
                return

    def go_over(self, old: Change, new: Change) -> Live:
        """Ask for the next setting; what came of the one before it, once the change is made.

        Raises JobFailedError where it is not made.
        """
        words = tuple(f"{key}={value}" for key, value in new.items() if value != old[key])
        request = control.change(self._run, control.SetParams(words=words))
        answer = control.wait_until_settled(self._run, request, _PATIENCE_SECONDS)
        self._steps.poll()
        record = self._steps.state.changes.records[-1]
        if record.status != "applied" or record.step is None:
            said = answer.reason if answer is not None else "no answer"
            raise JobFailedError(f"no change to {' '.join(words)}", why=record.reason or said)
        came_of = self.came_of(record.step)
        self._first, self._at_start, self._began = record.step + _SETTLED - 1, False, time.monotonic()
        return came_of

    def came_of(self, before: int | None = None) -> Live:
        """Of the setting in force, by its steps up to `before`, which are waited for."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._seen(before) and self._steps.wait(deadline):
            pass
        found = self._steps.intervals(self._first, before)
        state = self._steps.state
        enough = len(found) >= LEAST_INTERVALS
        outcome, reason = "measured" if enough else "slow", ""
        if not found:
            outcome = "out_of_memory" if state.status == "out_of_memory" else "failed"
            reason = state.ended.reason if state.ended is not None else "no whole step was seen"
        return Live(
            outcome=outcome,
            reason=reason,
            step_seconds=statistics.fmean(found) if found else None,
            spread_seconds=statistics.stdev(found) if enough else None,
            error_seconds=error_of(found) if enough else None,
            steps_measured=len(found),
            at_start=self._at_start,
            wall_seconds=time.monotonic() - self._began,
        )

    def _seen(self, before: int | None) -> bool:
        if before is not None:
            return before - 2 in self._steps.ends
        return len(self._steps.intervals(self._first)) >= LEAST_INTERVALS


def sweep_run(
    spec: RunSpec, group: Sequence[Candidate], start: Start, root: Path, best: float | None
) -> Generator[tuple[Candidate, Live]]:
    """Each of a group in one run, launched with the first; the one that ends the run is the last that comes.

    `best` is the least time of a step so far. The run is ended and its folder removed in the end, also where
    the caller stops asking.
    """
    began = time.monotonic()
    run = start(trial_spec(changed(spec, group[0].change), _STEPS), root)
    supervisor = run.supervisor_identity()
    try:
        live = LiveRun(run, began)
        for one, then in pairwise((*group, None)):
            assert one is not None
            live.wait_for_enough(best)
            if live.ended or then is None:
                yield one, live.came_of()
                return
            came_of = live.go_over(one.change, then.change)
            if came_of.step_seconds is not None:
                best = min(best or came_of.step_seconds, came_of.step_seconds)
            yield one, came_of
    finally:
        end_run(run, supervisor)
        shutil.rmtree(root, ignore_errors=True)
