"""`llmtop attach`: watch a run that goes on, or look at one that has ended."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode
from llmtop.profiler import rundir
from llmtop.tui.arguments import RUN_HELP
from llmtop.tui.commands.launching import follow_to_end, watch
from llmtop.tui.streams import on_terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--headless", action="store_true", help="follow on stderr instead of opening the monitor"
    )


def run(args: argparse.Namespace) -> ExitCode:
    found = rundir.find_run(rundir.runs_root(), args.run)
    if on_terminal() and not args.headless:
        return watch(found)
    return follow_to_end(found)
