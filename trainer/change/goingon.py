"""Going on with a run that has ended: from where it would, what is to be asked before, and the start itself.

The command line and the app ask the same of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import counted
from llmtop.trainer import control
from llmtop.trainer.change.afterend import (
    plan_after_end,
    require_more_steps,
    resume_changed,
    step_to_go_on_from,
)
from llmtop.trainer.change.plan import ChangePlan, require_fit
from llmtop.trainer.launch import require_trainer, resume_run

_LEAVE_SECONDS = 30.0
ANOTHER = "start another one: llmtop run, with --checkpoint-every N to have some next time"

MORE_STEPS = ("steps=",)
"""Stands for words that are still to come, and may name more steps."""


class Start(Struct, frozen=True, kw_only=True):
    """From where a run that has ended goes on."""

    step: int
    """Of its newest checkpoint; 0: it begins again from step 1."""
    asks: bool = False
    """Whether that is asked before: where the steps that it has made would be made again, and where it would
    begin again as it was, which has got it to no step yet."""


def require_ended(run: RunDir, state: RunState, words: Sequence[str]) -> None:
    """Raise UsageError for a run that goes on, or has all its steps and cannot make more: nothing was saved,
    or `words` give it none."""
    require_trainer(run)
    if state.ended is not None:
        # Its supervisor may have to put something away before it leaves.
        control.wait_for_end(run, _LEAVE_SECONDS)
    if run.supervisor_alive():
        raise UsageError(f"run {run.run_id} is going on", fix=f"watch it: llmtop attach {run.run_id}")
    if not has_all_steps(state):
        return
    if step_to_go_on_from(run, state) is None:
        raise no_checkpoint(run, state.steps_finished, ANOTHER)  # more steps would have nothing to follow
    if not names_steps(words):
        raise UsageError(
            f"run {run.run_id} has made all its {run.spec().options.steps:,} steps",
            fix=f"name more of them: llmtop resume {run.run_id} steps=N; or start another one: llmtop run",
        )


def has_all_steps(state: RunState) -> bool:
    """Whether a run ended because there was nothing left to do."""
    return state.status == "completed" and state.unsaved is None


def names_steps(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].strip() == "steps" for word in words)


def start_of(run: RunDir, state: RunState, *, changed: bool) -> Start:
    """`changed`: it goes on with another setting. Raises UsageError where nothing is there to go on from."""
    step, made = step_to_go_on_from(run, state), state.steps_finished
    if step is not None:
        return Start(step=step)
    if state.status == "completed":
        raise no_checkpoint(run, made, ANOTHER)
    return Start(step=0, asks=not changed or made > 0)


def no_checkpoint(run: RunDir, made: int, fix: str) -> UsageError:
    lost = ""
    if made:
        lost = f": the {counted(made, 'step')} that it has made {'was' if made == 1 else 'were'} not saved"
    return UsageError(
        f"run {run.run_id} has no checkpoint to go on from",
        why=f"none is complete in {run.checkpoints_dir}{lost}",
        fix=fix,
    )


def anew_fix(run: RunDir, words: Sequence[str]) -> str:
    """What to do where nothing is there to go on from; `words`: what was typed after the run's name."""
    command = shlex.join(("llmtop", "resume", run.run_id, *words, "--anew"))
    return f"{command} begins anew from step 1; or {ANOTHER}"


def plan_going_on(run: RunDir, state: RunState, words: Sequence[str]) -> ChangePlan | None:
    """What `words` change; None for none. Raises UsageError for what cannot be."""
    if not words:
        return None
    plan = plan_after_end(run, words)
    require_more_steps(run, plan, state.steps_finished)
    return plan


def go_on(run: RunDir, state: RunState, words: Sequence[str], *, anew: bool, force: bool) -> None:
    """Start it again; `anew`: also where steps are lost, `force`: also where it is predicted not to fit.

    Raises like `resume_run`, UsageError and DoesNotFitError, with nothing changed.
    """
    require_ended(run, state, words)
    start = start_of(run, state, changed=bool(words))
    if start.asks and not anew:
        raise no_checkpoint(run, state.steps_finished, anew_fix(run, words))
    plan = plan_going_on(run, state, words)
    if plan is None:
        resume_run(run)
        return
    if not force:
        require_fit(plan, host_memory_bytes())
    resume_changed(run, plan)
