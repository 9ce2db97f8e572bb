"""`llmtop resume`: go on with a run that has ended, from its newest checkpoint, in its own folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.afterend import (
    anew_words,
    fix_numbered,
    plan_after_end,
    require_more_steps,
    resume_changed,
)
from llmtop.trainer.change.goingon import anew_fix, no_checkpoint, require_ended, start_of
from llmtop.trainer.change.plan import require_fit
from llmtop.trainer.launch import devices_for, resume_run
from llmtop.tui.asking.changetext import change_lines
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.runs import find_run_here
from llmtop.tui.commandline.telling import stderr_width, tell
from llmtop.tui.commands.launching import add_how_to_watch, watch_as_asked
from llmtop.tui.commands.output import WIDTH
from llmtop.tui.commands.plan_text import caution_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="KEY=VALUE",
        help="an option to go on with, as llmtop set takes it: steps=1000 makes more steps",
    )
    parser.add_argument(
        "--fix",
        type=int,
        metavar="N",
        help="go on with fix N of the report of a run that ran out of memory",
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="where nothing was saved: begin again from step 1, in the same folder and record",
    )
    parser.add_argument("--force", action="store_true", help="also when it is predicted not to fit")
    add_how_to_watch(parser)


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run_here(args.run, "resume")
    state = read_state(found)
    require_ended(found, state, args.words)
    changed = args.fix is not None or bool(args.words)
    words = _words_of_change(found, state, args)
    step = _step_to_go_on_from(found, state, args, changed=changed)
    if changed:
        _resume_changed(found, state, args, words)
    else:
        resume_run(found)
    if not found.spec().on_cpu and (devices := devices_for(found)):
        tell(f"on the GPUs {devices} (CUDA_VISIBLE_DEVICES)")
    if step:
        # A state that was saved for a relaunch has been moved there.
        tell(f"goes on after step {step:,}, from {found.checkpoints_dir / f'step-{step}'}")
    else:
        tell(anew_words(state))
    for note in caution_lines(found.spec(), stderr_width() or WIDTH, launching=True):
        tell(note)
    return watch_as_asked(found, args)


def _words_of_change(found: RunDir, state: RunState, args: argparse.Namespace) -> Sequence[str]:
    """What is to be changed, as `key=value`."""
    if args.fix is None:
        return tuple(args.words)
    if args.words:
        raise UsageError("--fix and KEY=VALUE exclude each other", fix="give the one or the other")
    return fix_numbered(found, state, args.fix).words


def _resume_changed(found: RunDir, state: RunState, args: argparse.Namespace, words: Sequence[str]) -> None:
    plan = plan_after_end(found, words)
    # A fix is offered because it fits what there was, whatever the prediction alone says.
    if args.fix is None:
        require_more_steps(found, plan, state.steps_finished)
        if not args.force:
            require_fit(plan, host_memory_bytes())
    for line in change_lines(plan.changes, whole=False):
        tell(line)
    for lost in plan.lost:
        tell(f"lost: {lost}")
    resume_changed(found, plan)


def _step_to_go_on_from(found: RunDir, state: RunState, args: argparse.Namespace, *, changed: bool) -> int:
    """Of the newest checkpoint, 0 for none; raises UsageError where there has to be one, or must be none."""
    start, name = start_of(found, state, changed=changed), found.run_id
    if start.step and args.anew:
        raise UsageError(
            f"run {name} has a checkpoint of step {start.step:,} to go on from",
            why="--anew is for a run of which nothing was saved",
            fix="leave --anew out; or start another one: llmtop run",
        )
    if start.asks and not args.anew:
        fix = () if args.fix is None else ("--fix", str(args.fix))
        raise no_checkpoint(found, state.steps_finished, anew_fix(found, (*args.words, *fix)))
    return start.step
