"""`llmtop attach`: watch a run that goes on, or look at one that has ended."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record import rundir
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.streams import can_draw
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.launching import follow_to_end, watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument(
        "--pid",
        type=int,
        metavar="PID",
        help="in place of RUN: a training that llmtop has not started; a run looks at it until it ends, or"
        " until llmtop stop RUN, which leaves the process alone",
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
    on_screen = _on_screen(args)
    if args.pid is not None and not on_screen:
        _tell_how_to_end(found, args.pid)  # before: lines may be ended in any way
    if args.headless:
        return follow_to_end(found)
    if not on_screen:
        from llmtop.tui.commands.plain import plain_to_end

        return plain_to_end(found, args.every)
    code = watch(found, read_only=args.read_only)
    if args.pid is not None and found.supervisor_alive():
        _tell_how_to_end(found, args.pid)
    return code


def _on_screen(args: argparse.Namespace) -> bool:
    return not (args.plain or args.headless) and can_draw()


def _tell_how_to_end(run: rundir.RunDir, pid: int) -> None:
    """Nobody has asked for a supervisor that stays, and most who leave expect none."""
    tell(
        f"run {run.run_id} looks at process {pid} until that ends, also when you have left: llmtop stop"
        f" {run.run_id} ends the looking and leaves the process alone"
    )


def _wanted(args: argparse.Namespace) -> rundir.RunDir:
    if (args.run is None) == (args.pid is None):
        raise UsageError(
            "attach: name one thing to watch", fix="llmtop attach RUN (see llmtop ls), or --pid PID"
        )
    if args.pid is None:
        return find_run(args.run, "screen" if _on_screen(args) else "lines")
    from llmtop.trainer.script.start import observe  # whoever names a run has no use for it

    return observe(args.pid)
