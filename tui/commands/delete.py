"""`llmtop delete`: remove a run that has ended, with its logs and checkpoints."""

from __future__ import annotations

import argparse
import sys

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record import rundir
from llmtop.tui.asking.deletion import delete, require_deletable, weigh
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.streams import on_terminal
from llmtop.tui.commandline.telling import tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> ExitCode:
    root = rundir.runs_root()
    found = rundir.find_run(root, args.run)
    require_deletable(found)
    load = weigh(found)
    if not args.yes and not _agreed(found, load.in_words()):
        tell("nothing was deleted")
        return ExitCode.DONE
    print(f"deleted run {found.run_id}: {delete(found).in_words()}")
    return ExitCode.DONE


def _agreed(found: rundir.RunDir, what: str) -> bool:
    if not on_terminal():
        raise UsageError(
            f"run {found.run_id} is not deleted without being asked about",
            why=f"there is no terminal to ask on; {what} would go",
            fix=f"llmtop delete {found.run_id} --yes",
        )
    tell(f"Delete run {found.run_id} for good? {what}, in {found.path} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
