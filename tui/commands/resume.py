"""`llmtop resume`: go on with a run that has ended, from its newest checkpoint, in its own folder."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record import rundir
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.launch import resume_run
from llmtop.trainer.statefile import newest_in
from llmtop.tui.arguments import RUN_HELP
from llmtop.tui.commands.launching import add_how_to_watch, watch_as_asked
from llmtop.tui.telling import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_how_to_watch(parser)


def run(args: argparse.Namespace) -> ExitCode:
    found = rundir.find_run(rundir.runs_root(), args.run)
    step = _step_to_go_on_from(found, read_state(found))
    resume_run(found)
    # A state that was saved for a relaunch has been moved there.
    tell(f"goes on after step {step:,}, from {found.checkpoints_dir / f'step-{step}'}")
    return watch_as_asked(found, args)


def _step_to_go_on_from(found: RunDir, state: RunState) -> int:
    """Of the newest checkpoint; raises UsageError where there is nothing to go on with."""
    if found.supervisor_alive():
        raise UsageError(f"run {found.run_id} is going on", fix=f"watch it: llmtop attach {found.run_id}")
    if state.status == "completed":
        raise UsageError(
            f"run {found.run_id} has made all its {found.spec().options.steps:,} steps",
            fix="start another one: llmtop run",
        )
    saved = newest_in((found.checkpoints_dir, *restage_folders(found)))
    if saved is None:
        raise UsageError(
            f"run {found.run_id} has no checkpoint to go on from",
            why=f"none is complete in {found.checkpoints_dir}",
            fix="start another one: llmtop run, with --checkpoint-every N to have some next time",
        )
    return saved[0].step
