"""`llmtop attach`: watch a run that goes on, or look at one that has ended."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record import rundir
from llmtop.tui.arguments import RUN_HELP
from llmtop.tui.commands.launching import follow_to_end, watch
from llmtop.tui.streams import can_draw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="lines on stdout; so it is without a terminal too")
    how.add_argument(
        "--headless", action="store_true", help="follow on stderr: a line for each thing worth it"
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="of --plain: between two lines"
    )
    parser.add_argument("--read-only", action="store_true", help="look on: no key changes anything")


def run(args: argparse.Namespace) -> ExitCode:
    found = rundir.find_run(rundir.runs_root(), args.run)
    if not args.every > 0:
        raise UsageError(f"--every {args.every:g} is not a time", fix="give seconds, as --every 10")
    if args.headless:
        return follow_to_end(found)
    if args.plain or not can_draw():
        from llmtop.tui.commands.plain import plain_to_end

        return plain_to_end(found, args.every)
    return watch(found, read_only=args.read_only)
