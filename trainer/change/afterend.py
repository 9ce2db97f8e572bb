"""Changes with which a run that has ended goes on: those that would make it fit, or what a person wants."""

from __future__ import annotations

from collections.abc import Sequence

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import CHANGING_COMMANDS
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.oom.diagnosis import fixes_after
from llmtop.profiler.oom.fixes import Fix
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import counted
from llmtop.trainer.change.plan import ChangePlan, plan_change
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.change.setwords import as_set_takes_it
from llmtop.trainer.launch import require_trainer, resume_run
from llmtop.trainer.preflight import preflight
from llmtop.trainer.statefile import newest_in

BY_RESUME = CHANGING_COMMANDS[1]


def fixes_of(run: RunDir, state: RunState) -> tuple[Fix, ...]:
    """What would make a run fit that ran out of memory, as far as it can go on with it."""
    setting = state.changes.setting
    found = fixes_after(state, run.spec(setting), run.prediction(setting))
    return tuple(fix for fix in found if fix.number is not None)


def fix_numbered(run: RunDir, state: RunState, number: int) -> Fix:
    """Raises UsageError where there is none of that number."""
    known = fixes_of(run, state)
    for fix in known:
        if fix.number == number:
            return fix
    if state.status != "out_of_memory":
        raise UsageError(
            f"there is nothing to fix in run {run.run_id}",
            why="fixes are for runs that ran out of memory",
            fix=f"llmtop resume {run.run_id} KEY=VALUE goes on with a change of your own",
        )
    raise UsageError(
        f"run {run.run_id} has no fix {number}",
        why=f"its report lists {len(known)}"
        if known
        else "no change that it can go on with is predicted to fit",
        fix=f"llmtop report {run.run_id}",
    )


def plan_after_end(run: RunDir, words: Sequence[str], *, keep_global_batch: bool = True) -> ChangePlan:
    """What going on with `key=value ...` comes to; raises UsageError for what cannot be."""
    require_trainer(run)
    return plan_change(
        run.spec(),
        run.prediction(),
        words,
        keep_global_batch=keep_global_batch,
        by=BY_RESUME,
        ended=True,
    )


def require_more_steps(run: RunDir, plan: ChangePlan, made: int) -> None:
    """Raise UsageError where a run that has `made` so many steps has none left to make."""
    if plan.new.options.steps > made:
        return
    raise UsageError(
        f"run {run.run_id} has made {made:,} steps, and would be one of {plan.new.options.steps:,}",
        fix=f"name more of them: llmtop resume {run.run_id} steps=N",
    )


def step_to_go_on_from(run: RunDir, state: RunState) -> int | None:
    """Of the newest checkpoint, also of one that was saved for a relaunch; None where there is none."""
    saved = newest_in((run.checkpoints_dir, *restage_folders(run)))
    if saved is not None:
        return saved[0].step
    if state.checkpoints and read_hosts(run) is not None:
        # On the hosts, which say so themselves where it is not there any more.
        return state.checkpoints[-1].step
    return None


def anew_words(state: RunState) -> str:
    """What it comes to where a run goes on of which nothing was saved."""
    made = state.steps_finished
    if not made:
        return "begins anew: nothing was saved"
    were = "was" if made == 1 else "were"
    return f"begins anew from step 1: the {counted(made, 'step')} that it had made {were} not saved"


def resume_changed(run: RunDir, plan: ChangePlan) -> int:
    """Start an ended run again, on another setting: its ranks go on from its newest checkpoint, or begin anew
    where there is none. Raises like `resume_run`, with nothing changed."""
    require_trainer(run)
    with as_set_takes_it():
        preflight(plan.new, nvme_bytes=plan.new_prediction.nvme_bytes)
    before = run.in_force()
    setting = run.add_setting(plan.new, plan.new_prediction, plan.deepspeed_config)
    run.put_in_force(setting, ended_on=before.setting)
    try:
        return resume_run(run)
    except BaseException:
        if not run.supervisor_alive():
            run.put_in_force(before.setting, fall_back=before.fall_back, ended_on=before.ended_on)
        raise
