"""`llmtop plan`: predict a run; without a GPU and without torch."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from llmtop.presets.cautions import cautions
from llmtop.presets.errors import ExitCode
from llmtop.presets.inputs import inputs
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.memory.result import Prediction
from llmtop.tui import options
from llmtop.tui.commands.output import print_json, text_width
from llmtop.tui.commands.plan_text import plan_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    spec = options.resolve_run(args)
    prediction = predict_with_suggestions(spec)
    if args.json:
        print_json(answer(spec, prediction))
    else:
        print(plan_text(spec, prediction, text_width()))
    return ExitCode.DONE


def answer(spec: RunSpec, prediction: Prediction) -> dict[str, Any]:
    """The answer of `plan --json`: the prediction, and the run that it is of."""
    return {
        **msgspec.to_builtins(prediction),
        "cautions": cautions(spec),
        "inputs": inputs(spec),
        "spec": spec,
    }
