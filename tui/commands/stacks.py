"""`llmtop stacks`: the Python stacks of every rank of a run that goes on, for one that hangs."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record.feed import read_state
from llmtop.trainer.stacks import take_stacks
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.runs import find_run_here
from llmtop.tui.commandline.streams import write_data
from llmtop.tui.commandline.telling import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--rank", type=int, metavar="N", help="one rank only; default: all")


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run_here(args.run, "stacks")
    state = read_state(found)
    if args.rank is not None and not 0 <= args.rank < state.world_size:
        raise UsageError(
            f"stacks: run {found.run_id} has no rank {args.rank}",
            fix=f"use 0 to {state.world_size - 1}" if state.world_size > 1 else "its only rank is 0",
        )
    taken = take_stacks(found, state, args.rank)
    write_data(taken.text.rstrip("\n") + "\n")
    tell(f"kept in {taken.path}")
    return ExitCode.DONE if any(each.text for each in taken.ranks) else ExitCode.JOB_FAILED
