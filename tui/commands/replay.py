"""`llmtop replay`: see a recorded run again, at any pace and from any step."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record.remote import name_here
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.streams import can_draw, plain_streams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument(
        "--speed", type=int, default=10, metavar="N", help="times the run's own pace, 1 to 1000"
    )
    parser.add_argument("--step", type=int, metavar="N", help="begin at this step, held")
    parser.add_argument("--read-only", action="store_true", help="look on: no key changes anything")


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run(args.run)
    if not 1 <= args.speed <= 1000:
        raise UsageError(f"--speed {args.speed} is not between 1 and 1000")
    if not can_draw():
        raise UsageError(
            "a replay needs a terminal",
            why="standard input or output is not one, or TERM is dumb",
            fix=f"llmtop report {name_here(found.path)} says how the run went",
        )
    from llmtop.tui.app import run_app
    from llmtop.tui.asking.requests import ReplayWish

    wish = ReplayWish(speed=args.speed, step=args.step)
    with plain_streams():
        return ExitCode(run_app(start="replay", run=found, wish=wish, read_only=args.read_only))
