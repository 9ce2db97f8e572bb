"""One trial: a real run of a few steps in fresh processes under its own supervisor, within a time box.

Its rate is taken between the ends of steps, from the third on: the first step allocates and compiles, and the
worker looks closely at the second.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.launch import start_run
from llmtop.trainer.tune.rank import Outcome

STEPS = 8
_SKIPPED = 2
"""Steps before the window."""
_LEAST_INTERVALS = 2
_BEHIND = 1.5
"""Times the best time of a step, beyond which a trial need not be finished."""
_POLL_SECONDS = 0.2
_STOP_SECONDS = 20.0

Show = Callable[[RunState, float], None]


class Measured(Struct, frozen=True, kw_only=True):
    """What came of a trial."""

    outcome: Outcome
    reason: str = ""
    run: str = ""
    step_seconds: float | None = None
    spread_seconds: float | None = None
    steps_measured: int = 0
    steps_finished: int = 0
    peak_bytes: int | None = None
    wall_seconds: float = 0.0


def trial_spec(spec: RunSpec, steps: int = STEPS) -> RunSpec:
    """The run as a trial: few steps, nothing saved, no look at kernels, from random weights.

    Which weights they are changes no dense step's time; a mixture of experts sends tokens by them.
    """
    options = replace(
        spec.options,
        steps=steps,
        checkpoint_every=0,
        save_at_end=False,
        kernel_profile_step=0,
        classify_every=0,
        warmup_steps=0,
        lr_schedule="constant",
    )
    weights = spec.weights_dir if spec.model.moe is not None else None
    return replace(spec, options=options, weights_dir=weights, name="trial")


def run_trial(
    spec: RunSpec, root: Path, seconds: float, *, best_step_seconds: float | None, show: Show
) -> Measured:
    """Carry it out. Whatever goes wrong in it is its outcome; Ctrl-C ends its run and is raised again."""
    began = time.monotonic()
    try:
        run = start_run(spec, predict(spec), root=root)
    except LlmtopError as error:
        return Measured(outcome="failed", reason=error.in_one_line, wall_seconds=time.monotonic() - began)
    try:
        cut = _watch(run, began + seconds, best_step_seconds, show)
    finally:
        end_run(run)
    return _measured(run, cut, time.monotonic() - began)


def _watch(run: RunDir, deadline: float, best: float | None, show: Show) -> Outcome | None:
    """Until it has ended, is far behind, or its time is up; which of the latter."""
    reader = RunReader(run)
    while True:
        state = reader.poll()
        show(state, deadline - time.monotonic())
        if state.status in ENDED:
            return None
        if (
            best is not None
            and len(found := intervals(run)) >= _LEAST_INTERVALS
            and min(found) > _BEHIND * best
        ):
            return "slow"
        if time.monotonic() > deadline:
            return "timeout"
        time.sleep(_POLL_SECONDS)


def end_run(run: RunDir) -> None:
    """Have nothing of it left; a supervisor that does not answer is ended by signals."""
    if run.supervisor_alive():
        try:
            control.stop(run, save=False)
        except LlmtopError:
            return  # it has ended in between
        _signal_unless_ended(run)


def _signal_unless_ended(run: RunDir) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        control.wait_for_end(run, _STOP_SECONDS)
        identity = run.supervisor_identity()
        if identity is None or not run.supervisor_alive():
            return
        os.kill(identity.pid, number)


def intervals(run: RunDir) -> list[float]:
    """Seconds between the ends of steps, without the first ones and the last, which is reported at once."""
    last = run.spec().options.steps
    events = [e for e in EventTail(run.events_path(0)).poll() if isinstance(e, StepFinished)]
    usable = [e.ended if e.ended is not None else e.t for e in events if _SKIPPED <= e.step < last]
    return [later - before for before, later in zip(usable, usable[1:], strict=False)]


def _measured(run: RunDir, cut: Outcome | None, wall_seconds: float) -> Measured:
    state = RunReader(run).poll()
    found = intervals(run)
    enough = len(found) >= _LEAST_INTERVALS
    peaks = [m.peak_bytes for rank in state.ranks.values() for m in rank.peaks.values() if m.peak_bytes]
    outcome, reason = _outcome(state, cut, enough=enough)
    return Measured(
        outcome=outcome,
        reason=reason,
        run=run.run_id,
        step_seconds=statistics.fmean(found) if enough and outcome in ("measured", "slow") else None,
        spread_seconds=spread(found) if enough else None,
        steps_measured=len(found),
        steps_finished=state.steps_finished,
        peak_bytes=max(peaks, default=None),
        wall_seconds=wall_seconds,
    )


def _outcome(state: RunState, cut: Outcome | None, *, enough: bool) -> tuple[Outcome, str]:
    why = state.ended.reason if state.ended is not None else "its supervisor wrote no end"
    if cut == "slow":
        return "slow", f"ended early: over {_BEHIND:g} times the best time of a step"
    if cut == "timeout":
        if enough:
            return "measured", "its time was up after fewer steps"
        return "timeout", f"no rate within its time: {state.steps_finished} steps"
    if state.status == "out_of_memory":
        return "out_of_memory", why
    if state.status == "completed" and enough:
        return "measured", ""
    return "failed", why if state.status != "completed" else "too few steps to take a rate from"


def spread(found: Sequence[float]) -> float:
    return statistics.stdev(found) if len(found) > 1 else 0.0
