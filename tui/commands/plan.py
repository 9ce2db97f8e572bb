"""`llmtop plan`: predict a run; without a GPU and without torch."""

from __future__ import annotations

import argparse

from llmtop.presets.errors import ExitCode
from llmtop.profiler.memory.predict import predict
from llmtop.tui import options
from llmtop.tui.commands.output import print_json
from llmtop.tui.commands.plan_text import plan_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    spec = options.resolve_run(args)
    prediction = predict(spec)
    if args.json:
        print_json(prediction)
    else:
        print(plan_text(spec, prediction))
    return ExitCode.DONE
