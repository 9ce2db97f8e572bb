"""`llmtop logs`: what the ranks wrote to standard output and error."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.record.feed import RunReader
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.streams import write_data
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.follow import POLL_SECONDS


class LogTail:
    """Whole lines that have been added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._told = False

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """New whole lines; with `last`, a torn one at the end too."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._told:
                self._told = True
                tell(f"{self._path} cannot be read: {error.strerror or error}")
            return
        end = len(content) if last else content.rfind(b"\n") + 1
        self._offset += end
        yield from content[:end].decode(errors="replace").splitlines()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument("--rank", type=int, metavar="N", help="one rank only; default: all, each line named")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run(args.run)
    world_size = found.spec().world_size
    if args.rank is not None and not 0 <= args.rank < world_size:
        raise UsageError(
            f"logs: run {found.run_id} has no rank {args.rank}",
            fix=f"use 0 to {world_size - 1}" if world_size > 1 else "its only rank is 0",
        )
    ranks = range(world_size) if args.rank is None else (args.rank,)
    tails = {rank: LogTail(found.log_path(rank)) for rank in ranks}
    reader = RunReader(found)
    while True:
        # The state is read before the logs, so that nothing written before the end is missed.
        over = not args.follow or reader.poll().status in ENDED
        for rank, tail in tails.items():
            lead = f"[rank {rank}] " if args.rank is None else ""
            for line in tail.lines(last=over):
                write_data(f"{lead}{line}\n")
        if args.follow:
            sys.stdout.flush()
        if over:
            return ExitCode.DONE
        time.sleep(POLL_SECONDS)
