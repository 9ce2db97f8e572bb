"""`llmtop export`: one run as one file, without secrets."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmtop.presets.errors import ExitCode
from llmtop.profiler.export.archive import SUFFIX, Choices, Exported, export_run
from llmtop.profiler.units import counted, format_bytes, format_seconds
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commands.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where to; by default RUN{SUFFIX} here")
    parser.add_argument("--no-logs", action="store_true", help="without what the ranks wrote")
    parser.add_argument(
        "--snapshots",
        action="store_true",
        help="with memory snapshots and traces, as they are: nobody looks for secrets in them",
    )
    parser.add_argument("--no-parquet", action="store_true", help="the metrics as CSV alone")
    parser.add_argument("--force", action="store_true", help="in place of a file that is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run(args.run)
    choices = Choices(
        logs=not args.no_logs, snapshots=args.snapshots, parquet=False if args.no_parquet else None
    )
    made = export_run(found, args.out, choices=choices, force=args.force)
    if args.json:
        print_json(made)
    else:
        print("\n".join(_lines(made)))
    return ExitCode.DONE


def _lines(made: Exported) -> list[str]:
    lines = [
        f"{made.path}: {format_bytes(made.size_bytes)}, {counted(made.files, 'file')} of "
        f"{format_bytes(made.unpacked_bytes)}, in {format_seconds(made.seconds)}"
    ]
    if made.secrets_removed:
        lines.append(f"  {counted(made.secrets_removed, 'secret')} taken out")
    return [*lines, *(f"  not in it: {left.in_words}" for left in made.left_out)]
