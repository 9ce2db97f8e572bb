"""`llmtop resume`: go on with a run that has ended, from its newest checkpoint, in its own folder."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record import rundir
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.launch import resume_run
from llmtop.trainer.statefile import newest_step
from llmtop.tui.commands.launching import follow_to_end, watch
from llmtop.tui.streams import can_draw
from llmtop.tui.telling import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id, a unique part of it, or latest")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="start and return; prints the run's id")
    how.add_argument(
        "--headless", action="store_true", help="follow on stderr instead of opening the monitor"
    )


def run(args: argparse.Namespace) -> ExitCode:
    found = rundir.find_run(rundir.runs_root(), args.run)
    step = _step_to_go_on_from(found, read_state(found))
    resume_run(found)
    tell(f"goes on after step {step:,}, from {found.checkpoints_dir / f'step-{step}'}")
    if args.detach:
        print(found.run_id)
        tell(f"llmtop attach {found.run_id} watches it, llmtop stop {found.run_id} ends it")
        return ExitCode.DONE
    if can_draw() and not args.headless:
        return watch(found)
    print(found.run_id, flush=True)
    return follow_to_end(found)


def _step_to_go_on_from(found: RunDir, state: RunState) -> int:
    """Of the newest checkpoint; raises UsageError where there is nothing to go on with."""
    if found.supervisor_alive():
        raise UsageError(
            f"run {found.run_id} is going on", fix=f"watch it: llmtop attach {found.run_id}"
        )
    if state.status == "completed":
        raise UsageError(
            f"run {found.run_id} has made all its {found.spec().options.steps:,} steps",
            fix="start another one: llmtop run",
        )
    step = newest_step(found.checkpoints_dir)
    if step is None:
        raise UsageError(
            f"run {found.run_id} has no checkpoint to go on from",
            why=f"none is complete in {found.checkpoints_dir}",
            fix="start another one: llmtop run, with --checkpoint-every N to have some next time",
        )
    return step
