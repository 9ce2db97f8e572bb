"""`llmtop attach`: watch a run that goes on, or look at one that has ended."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record import rundir
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.streams import can_draw
from llmtop.tui.commands.launching import follow_to_end, watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="in place of RUN: a training that llmtop has not started"
    )
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
    if not args.every > 0:
        raise UsageError(f"--every {args.every:g} is not a time", fix="give seconds, as --every 10")
    found = _wanted(args)
    if args.headless:
        return follow_to_end(found)
    if args.plain or not can_draw():
        from llmtop.tui.commands.plain import plain_to_end

        return plain_to_end(found, args.every)
    return watch(found, read_only=args.read_only)


def _wanted(args: argparse.Namespace) -> rundir.RunDir:
    if (args.run is None) == (args.pid is None):
        raise UsageError(
            "attach: name one thing to watch", fix="llmtop attach RUN (see llmtop ls), or --pid PID"
        )
    if args.pid is None:
        on_screen = not (args.plain or args.headless) and can_draw()
        return find_run(args.run, "screen" if on_screen else "lines")
    from llmtop.trainer.script.start import observe  # whoever names a run has no use for it

    return observe(args.pid)
