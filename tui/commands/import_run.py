"""`llmtop import-run`: an exported run, to be looked at here."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.export.importing import LIMIT_BYTES, import_run
from llmtop.profiler.record import rundir
from llmtop.tui.commands.output import print_json

_GIB = 1 << 30


class ImportedLine(Struct, frozen=True, kw_only=True):
    """The answer of `--json`."""

    run_id: str
    path: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("archive", type=Path, metavar="ARCHIVE", help="a file of llmtop export")
    parser.add_argument("--name", metavar="NAME", help="under which it is kept; by default its own id")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="GIB",
        help=f"what it may come to unpacked; by default {LIMIT_BYTES // _GIB}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    if args.limit is not None and not 0 < args.limit < 1 << 20:
        raise UsageError(f"--limit {args.limit:g} is no size", fix="give GiB, as --limit 40")
    limit_bytes = None if args.limit is None else round(args.limit * _GIB)
    found = import_run(args.archive, rundir.runs_root(), name=args.name, limit_bytes=limit_bytes)
    if args.json:
        print_json(ImportedLine(run_id=found.run_id, path=str(found.path)))
    else:
        print(f"run {found.run_id} is in {found.path}, to be looked at: llmtop report {found.run_id}")
    return ExitCode.DONE
