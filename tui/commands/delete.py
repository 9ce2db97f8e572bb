"""`llmtop delete`: remove a run that has ended, with its logs and checkpoints."""

from __future__ import annotations

import argparse
import sys

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record import rundir
from llmtop.profiler.record.hosts import read_hosts
from llmtop.tui.asking.deletion import delete, require_deletable, weigh
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.streams import on_terminal
from llmtop.tui.commandline.telling import tell

_MOST_NAMED = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> ExitCode:
    root = rundir.runs_root()
    found = rundir.find_run(root, args.run)
    require_deletable(found)
    load, hosts = weigh(found), read_hosts(found)
    if not args.yes and not _agreed(found, load.in_words()):
        tell("nothing was deleted")
        return ExitCode.DONE
    print(f"deleted run {found.run_id}: {delete(found).in_words()}")
    if hosts is not None:
        names = ", ".join(host.name for host in hosts.hosts[:_MOST_NAMED])
        more = ", ..." if len(hosts.hosts) > _MOST_NAMED else ""
        tell(f"where they have no common file system, {names}{more} keep their part: llmtop delete there")
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
