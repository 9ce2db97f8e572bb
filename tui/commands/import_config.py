"""`llmtop import`: a DeepSpeed configuration as options of llmtop, with every problem named."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from llmtop.presets.errors import ExitCode
from llmtop.trainer.dsimport.problem import Problem
from llmtop.trainer.dsimport.read import import_config
from llmtop.tui.commandline.options import option_text, setting_texts
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json


class ImportAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `import --json`."""

    schema_version: int = 1
    file: str
    fatal: bool
    """Whether DeepSpeed or llmtop refuses the file."""
    options: dict[str, Any]
    command_line: str
    problems: tuple[Problem, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="DS_JSON", help="a DeepSpeed configuration file")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the job, for a file that names only the global batch",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    imported = import_config(Path(args.file), world_size=args.world_size)
    answer = ImportAnswer(
        file=args.file,
        fatal=imported.fatal,
        options=imported.values,
        command_line=command_line(imported.values),
        problems=imported.problems,
    )
    if args.json:
        print_json(answer)
    elif answer.command_line:
        print(answer.command_line)
    for problem in imported.problems:
        tell(f"{'error' if problem.fatal else 'warning'}: {args.file}: {problem}")
    return ExitCode.USAGE if answer.fatal else ExitCode.DONE


def command_line(values: dict[str, Any]) -> str:
    """The values of options as somebody would type them; raw DeepSpeed keys as `--set`."""
    words = [option_text(key, value) for key, value in values.items() if key != "deepspeed"]
    if raw := values.get("deepspeed"):
        words += setting_texts("deepspeed", raw)
    return " ".join(words)
