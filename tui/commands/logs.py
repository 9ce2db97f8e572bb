"""`llmtop logs`: what the ranks wrote to standard output and error."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.fleet.part import LeadPart
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.logend import LINE_END, offset_of_last
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.streams import write_data
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.follow import POLL_SECONDS

if TYPE_CHECKING:
    from llmtop.trainer.hosts.selection import Wanted

BLOCK_BYTES = 1 << 20
"""Read at a time; a line that is longer comes in parts."""


class LogTail:
    """Whole lines that have been added to a file since the last look; no more of it than a block is held."""

    def __init__(self, path: Path, last_lines: int | None = None) -> None:
        """`last_lines`: how many of those that are there at the first look; None: all."""
        self._path = path
        self._last_lines = last_lines
        self._offset = 0
        self.unreadable = False
        self.seen = False
        """Whether any line came."""

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """New whole lines; with `last`, a torn one at the end too."""
        try:
            with self._path.open("rb") as stream:
                for line in self._added(stream, last):
                    self.seen = True
                    yield line
        except FileNotFoundError:
            # What comes later is new.
            self._last_lines = None
        except OSError as error:
            if not self.unreadable:
                self.unreadable = True
                tell(f"{self._path} cannot be read: {error.strerror or error}")

    def _added(self, stream: BinaryIO, last: bool) -> Iterator[str]:
        size = os.fstat(stream.fileno()).st_size
        if self._last_lines is not None:
            self._offset, self._last_lines = offset_of_last(stream, self._last_lines), None
        if size < self._offset:
            self._offset = 0  # somebody has emptied it
        stream.seek(self._offset)
        held, at = b"", self._offset
        while at < size and (block := stream.read(min(BLOCK_BYTES, size - at))):
            held, at = held + block, at + len(block)
            lines, held = whole_lines(held)
            if len(held) >= BLOCK_BYTES:
                lines, held = [*lines, held], b""
            self._offset = at - len(held)
            yield from (line.decode(errors="replace") for line in lines)
        if last and held:
            self._offset = at
            yield held.removesuffix(b"\r").decode(errors="replace")


def whole_lines(content: bytes) -> tuple[list[bytes], bytes]:
    """Its lines without their ends, and what follows the last of them: no line yet."""
    *lines, rest = LINE_END.split(content)
    if lines and not rest and content.endswith(b"\r"):
        # The other half of what ends this line may come yet.
        return lines[:-1], lines[-1] + b"\r"
    return lines, rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument("--rank", type=int, metavar="N", help="one rank only; default: all, each line named")
    parser.add_argument("--tail", type=int, metavar="N", help="the last N lines of each rank only")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")


def _wanted(args: argparse.Namespace) -> Wanted:
    """Of a run on another machine."""
    if ":" not in args.run:
        return "whole"
    from llmtop.trainer.hosts.selection import LogsWanted

    return LogsWanted(rank=args.rank, tail=args.tail)


def run(args: argparse.Namespace) -> ExitCode:
    if args.tail is not None and args.tail < 0:
        raise UsageError(f"--tail {args.tail} is no number of lines", fix="give 0 or more, as --tail 20")
    found = find_run(args.run, _wanted(args))
    world_size = found.spec().world_size
    if args.rank is not None and not 0 <= args.rank < world_size:
        raise UsageError(
            f"logs: run {found.run_id} has no rank {args.rank}",
            fix=f"use 0 to {world_size - 1}" if world_size > 1 else "its only rank is 0",
        )
    ranks = range(world_size) if args.rank is None else (args.rank,)
    tails = {rank: LogTail(found.log_path(rank), args.tail) for rank in ranks}
    # Whether the run has ended its supervisor alone says.
    reader = RunReader(LeadPart(found))
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
            _tell_what_is_silent(found, tails, args.tail)
            return ExitCode.DONE
        time.sleep(POLL_SECONDS)


def _tell_what_is_silent(found: RunDir, tails: dict[int, LogTail], tail: int | None) -> None:
    """Nothing at all on standard output would leave open whether the question was understood."""
    if tail == 0 or any(one.seen or one.unreadable for one in tails.values()):
        return
    if len(tails) == 1:
        told = f"rank {next(iter(tails))} of run {found.run_id} has printed nothing"
    else:
        told = f"no rank of run {found.run_id} has printed anything"
    if read_hosts(found) is not None:
        told += " that this machine has: each host keeps the output of its ranks"
    elif found.spec().script is not None and 0 not in tails:
        told += " of its own: what a script's ranks print is in the output of their command, rank 0's"
    tell(told)
