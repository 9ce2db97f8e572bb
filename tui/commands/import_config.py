"""`llmtop import`: a DeepSpeed configuration as options of llmtop, with every problem named."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from llmtop.presets.errors import ExitCode
from llmtop.trainer import dsimport
from llmtop.tui.commands.output import print_json
from llmtop.tui.options import option_text, setting_texts


class ImportProblem(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    what: str
    fix: str
    fatal: bool


class ImportAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `import --json`."""

    schema_version: int = 1
    file: str
    fatal: bool
    """Whether DeepSpeed or llmtop refuses the file."""
    options: dict[str, Any]
    command_line: str
    problems: tuple[ImportProblem, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="DS_JSON", help="a DeepSpeed configuration file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    answer = _read(args.file)
    if args.json:
        print_json(answer)
    else:
        print(answer.command_line)
    for problem in answer.problems:
        word = "error" if problem.fatal else "warning"
        print(f"{word}: {answer.file}: {problem.key}: {problem.what}", file=sys.stderr)
        if problem.fix:
            print(f"  fix: {problem.fix}", file=sys.stderr)
    return ExitCode.USAGE if answer.fatal else ExitCode.DONE


def _read(file: str) -> ImportAnswer:
    imported = dsimport.import_config(Path(file))
    return ImportAnswer(
        file=file,
        fatal=any(problem.fatal for problem in imported.problems),
        options=imported.values,
        command_line=command_line(imported.values),
        problems=tuple(
            ImportProblem(key=p.key, what=p.what, fix=p.fix, fatal=p.fatal) for p in imported.problems
        ),
    )


def command_line(values: dict[str, Any]) -> str:
    """The values of options as somebody would type them; raw DeepSpeed keys as `--set`."""
    words = [option_text(key, value) for key, value in values.items() if key != "deepspeed"]
    words += setting_texts("deepspeed", values.get("deepspeed") or {})
    return " ".join(words)
