"""`llmtop delete`: remove a run that has ended, with its logs and checkpoints."""

from __future__ import annotations

import argparse
import sys

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record import rundir
from llmtop.profiler.record.hosts import read_hosts
from llmtop.trainer.hosts.left import hosts_never_there
from llmtop.tui.asking.deletion import delete, require_deletable, weigh
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.runs import find_run_here
from llmtop.tui.commandline.streams import on_terminal
from llmtop.tui.commandline.telling import tell

_MOST_NAMED = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run_here(args.run, "delete")
    require_deletable(found)
    load, names = weigh(found), _hosts_with_a_part(found)
    if not args.yes and not _agreed(found, load.in_words()):
        tell("nothing was deleted")
        return ExitCode.DONE
    print(f"deleted run {found.run_id}: {delete(found).in_words()}")
    if names:
        told = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
        keep = "keeps its" if len(names) == 1 else "keep their"
        tell(f"where there is no common file system, {told} {keep} part: llmtop delete there")
    return ExitCode.DONE


def _hosts_with_a_part(found: rundir.RunDir) -> list[str]:
    """Hosts that may have a folder of their own: none of srun's and pdsh's, which share this one."""
    hosts = read_hosts(found)
    if hosts is None or hosts.launcher != "ssh":
        return []
    never = hosts_never_there(found)
    return [host.name for host in hosts.hosts if host.name not in never]


def _agreed(found: rundir.RunDir, what: str) -> bool:
    if not on_terminal():
        raise UsageError(
            f"run {found.run_id} is not deleted without being asked about",
            why=f"there is no terminal to ask on; {what} would go",
            fix=f"llmtop delete {found.run_id} --yes",
        )
    tell(f"Delete run {found.run_id} for good? {what}, in {found.path} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
