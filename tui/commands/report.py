"""`llmtop report`: predicted against actual for a run that goes on or has ended."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record import rundir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.tui.arguments import RUN_HELP
from llmtop.tui.commands.output import print_json, text_width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    report = build_report(rundir.find_run(rundir.runs_root(), args.run))
    if args.json:
        print_json(report)
    else:
        print(render(report, text_width()))
    return ExitCode.DONE
