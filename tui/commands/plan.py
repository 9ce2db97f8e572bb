"""`llmtop plan`: predict a run; without a GPU and without torch."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from llmtop.presets.cautions import cautions
from llmtop.presets.errors import ExitCode
from llmtop.presets.inputs import inputs
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.explain import explain
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.memory.result import Prediction
from llmtop.tui import options
from llmtop.tui.commands.output import print_json, text_width
from llmtop.tui.commands.plan_explain import PEAK, WHICH, check_which, explain_text
from llmtop.tui.commands.plan_text import plan_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.add_argument_group("other questions")
    asked.add_argument(
        "--explain",
        metavar="WHEN",
        nargs="?",
        const=PEAK,
        help="each component as a formula with its numbers: at the peak, all, or one moment's name",
    )


def run(args: argparse.Namespace) -> ExitCode:
    _recipe_after(args, "explain")
    spec = options.resolve_run(args)
    if args.explain is not None:
        _explain(spec, check_which(args.explain), as_json=args.json)
        return ExitCode.DONE
    prediction = predict_with_suggestions(spec)
    if args.json:
        print_json(answer(spec, prediction))
    else:
        print(plan_text(spec, prediction, text_width()))
    return ExitCode.DONE


def _recipe_after(args: argparse.Namespace, key: str) -> None:
    """A recipe may follow an option whose value may be left out."""
    value = getattr(args, key)
    if value is not None and value not in WHICH and args.recipe is None:
        args.recipe = value
        setattr(args, key, PEAK)


def _explain(spec: RunSpec, which: str, *, as_json: bool) -> None:
    explanation = explain(spec)
    if as_json:
        print_json({"explanation": explanation, "spec": spec})
    else:
        print(explain_text(spec, explanation, which, text_width()))


def answer(spec: RunSpec, prediction: Prediction) -> dict[str, Any]:
    """The answer of `plan --json`: the prediction, and the run that it is of."""
    return {
        **msgspec.to_builtins(prediction),
        "cautions": cautions(spec),
        "inputs": inputs(spec),
        "spec": spec,
    }
