"""One trial: a real run of a few steps in fresh processes under its own supervisor, within a time box.

Its rate is taken between the ends of steps, from the third on: the first step allocates and compiles, and the
worker looks closely at the second. It ends early once its rate is known well enough, or is far behind.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import JobFailedError, LlmtopError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.feed import RunReader, read_state
from llmtop.profiler.record.processidentity import ProcessIdentity
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.launch import start_run
from llmtop.trainer.tune.interrupt import undisturbed
from llmtop.trainer.tune.rank import Outcome

STEPS = 8
SKIPPED_STEPS = 2
"""Steps before the window."""
LEAST_INTERVALS = 2
_ENOUGH_INTERVALS = 3
_ENOUGH_ERROR = 0.002
"""Standard error of the time of a step, as a share of it, from which on a trial need not go on."""
_CLEAR_ERRORS = 5.0
"""Standard errors that a time is behind the best by, from which on a trial need not go on: more steps would
only tell better how far. Many, as three intervals do not tell their own scatter well."""
BEHIND = 1.5
"""Times the best time of a step, beyond which a trial need not be finished."""
_POLL_SECONDS = 0.1
_STOP_SECONDS = 20.0

Show = Callable[[RunState, float], None]
Start = Callable[[RunSpec, Path], RunDir]
"""Launches a run below a folder; as `start_run`."""


class Measured(Struct, frozen=True, kw_only=True):
    """What came of a trial."""

    outcome: Outcome
    reason: str = ""
    run: str = ""
    step_seconds: float | None = None
    spread_seconds: float | None = None
    error_seconds: float | None = None
    steps_measured: int = 0
    steps_finished: int = 0
    peak_bytes: int | None = None
    wall_seconds: float = 0.0


def trial_spec(spec: RunSpec, steps: int = STEPS) -> RunSpec:
    """The run as a trial: few steps, nothing saved, nothing healed, no look at kernels, from random weights.

    Which weights they are changes no dense step's time; a mixture of experts sends tokens by them.
    """
    options = replace(
        spec.options,
        steps=steps,
        checkpoint_every=0,
        save_at_end=False,
        heal=False,
        kernel_profile_step=0,
        classify_every=0,
        warmup_steps=0,
        lr_schedule="constant",
    )
    weights = spec.weights_dir if spec.model.moe is not None else None
    return replace(spec, options=options, weights_dir=weights, name="trial")


def start_trial(spec: RunSpec, root: Path) -> RunDir:
    """Launch it the usual way."""
    return start_run(spec, predict(spec), root=root)


def run_trial(
    spec: RunSpec,
    root: Path,
    seconds: float,
    *,
    best_step_seconds: float | None,
    show: Show,
    start: Start = start_trial,
    early: bool = True,
) -> Measured:
    """Carry it out. Whatever goes wrong in it is its outcome; what ends the search ends its run first.

    `early`: whether it may end before its last step. Raises LlmtopError where no trial at all could be kept.
    """
    began = time.monotonic()
    run, supervisor = None, None
    try:
        with undisturbed():
            run = start(spec, root)
            supervisor = run.supervisor_identity()
        steps = StepEnds(run)
        cut = _watch(run, steps, began + seconds, best_step_seconds, show, early=early)
    except (UsageError, JobFailedError) as error:
        if run is not None:
            raise
        return Measured(outcome="failed", reason=error.in_one_line, wall_seconds=time.monotonic() - began)
    except OSError as error:
        raise LlmtopError(
            f"a trial cannot be kept in {root}",
            why=error.strerror or str(error),
            fix="make the folder writable and free some space",
        ) from error
    finally:
        if run is not None:
            with undisturbed():
                end_run(run, supervisor)
    return _measured(run, steps, cut, time.monotonic() - began)


def finished_trial(run: RunDir) -> Measured | None:
    """What came of a trial whose search was killed meanwhile; None where it has no end of its own."""
    state = read_state(run)
    if state.ended is None or state.status not in ("completed", "out_of_memory", "failed"):
        return None
    created = run.created()
    return _measured(run, StepEnds(run), None, state.ended.t - created if created is not None else 0.0)


class StepEnds:
    """When the steps of a trial ended, each event read once."""

    def __init__(self, run: RunDir) -> None:
        self._tail = EventTail(run.events_path(0))
        self._last = run.spec().options.steps
        self._ends: list[float] = []
        self._closed = False

    def intervals(self) -> list[float]:
        """Seconds between the ends so far, without the first ones and the last, which is reported at once."""
        for event in () if self._closed else self._tail.poll():
            if isinstance(event, StepFinished) and SKIPPED_STEPS <= event.step < self._last:
                self._ends.append(event.ended if event.ended is not None else event.t)
        return [later - before for before, later in zip(self._ends, self._ends[1:], strict=False)]

    def close(self) -> None:
        """Before the run is asked to stop: the step that is then its last is reported at once too."""
        self._closed = True


def _watch(
    run: RunDir,
    steps: StepEnds,
    deadline: float,
    best_step_seconds: float | None,
    show: Show,
    *,
    early: bool,
) -> Outcome | None:
    """Until it has ended, or need not go on; why the latter."""
    reader = RunReader(run)
    while True:
        state = reader.poll()
        show(state, deadline - time.monotonic())
        if state.status in ENDED:
            return None
        cut = why_over(steps.intervals(), deadline, best_step_seconds, early=early)
        if cut is not None:
            steps.close()
            return cut
        time.sleep(_POLL_SECONDS)


def why_over(
    found: Sequence[float], deadline: float, best_step_seconds: float | None, *, early: bool
) -> Outcome | None:
    """Why a trial need not go on that has `found` these seconds of steps; None where it must.

    `deadline` on the monotonic clock; `best_step_seconds` is that of the fastest setting so far.
    """
    best = math.inf if best_step_seconds is None else best_step_seconds
    if early and len(found) >= LEAST_INTERVALS and min(found) > BEHIND * best:
        return "slow"
    if early and len(found) >= _ENOUGH_INTERVALS:
        mean, error = statistics.fmean(found), error_of(found)
        if error <= _ENOUGH_ERROR * mean or mean - best >= _CLEAR_ERRORS * error:
            return "measured"
    return "timeout" if time.monotonic() > deadline else None


def end_run(run: RunDir, supervisor: ProcessIdentity | None = None) -> None:
    """Have nothing of it left. A supervisor that cannot be asked, or does not answer, is ended by signals.

    `supervisor` is who it is, for a run whose folder may be gone.
    """
    identity = supervisor or run.supervisor_identity()
    if identity is None:
        return
    patience = _STOP_SECONDS
    try:
        control.stop(run, save=False)
    except LlmtopError:
        patience = 0.0  # it has ended in between, or nothing can be written for it
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL, None):
        if _gone(identity, patience) or number is None:
            return
        with suppress(ProcessLookupError):
            os.kill(identity.pid, number)
        patience = _STOP_SECONDS


def _gone(identity: ProcessIdentity, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while identity.alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS / 2)
    return True


def _measured(run: RunDir, steps: StepEnds, cut: Outcome | None, wall_seconds: float) -> Measured:
    state = read_state(run)
    found = steps.intervals()
    enough = len(found) >= LEAST_INTERVALS
    peaks = [m.peak_bytes for rank in state.ranks.values() for m in rank.peaks.values() if m.peak_bytes]
    outcome, reason = _outcome(state, cut, enough=enough)
    return Measured(
        outcome=outcome,
        reason=reason,
        run=run.run_id,
        step_seconds=statistics.fmean(found) if enough and outcome in ("measured", "slow") else None,
        spread_seconds=statistics.stdev(found) if enough else None,
        error_seconds=error_of(found) if enough else None,
        steps_measured=len(found),
        steps_finished=state.steps_finished,
        peak_bytes=max(peaks, default=None),
        wall_seconds=wall_seconds,
    )


def _outcome(state: RunState, cut: Outcome | None, *, enough: bool) -> tuple[Outcome, str]:
    why = state.ended.reason if state.ended is not None else "its supervisor wrote no end"
    if cut == "slow":
        return "slow", f"ended early: over {BEHIND:g} times the best time of a step"
    if cut == "measured":
        return "measured", "ended early: its rate was known"
    if cut == "timeout":
        if enough:
            return "measured", "its time was up after fewer steps"
        return "timeout", f"no rate within its time: {state.steps_finished} steps"
    if state.status == "out_of_memory":
        return "out_of_memory", why
    if state.status == "completed" and enough:
        return "measured", ""
    return "failed", why if state.status != "completed" else "too few steps to take a rate from"


def error_of(found: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(found) / math.sqrt(len(found))
