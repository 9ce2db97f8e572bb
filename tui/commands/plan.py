"""`llmtop plan`: predict a run, explain that, or search for another; without a GPU and without torch."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from llmtop.presets import catalog
from llmtop.presets.cautions import cautions
from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.inputs import inputs
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.calibration import calibrated, find
from llmtop.profiler.cost.sweep import Axis, changed, parse_axes, sweep
from llmtop.profiler.cost.where import ALLOWED, gpu_names, where
from llmtop.profiler.memory.explain import explain
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.memory.result import Prediction
from llmtop.tui import options
from llmtop.tui.commands.output import print_json, text_width
from llmtop.tui.commands.plan_explain import PEAK, WHICH, check_which, explain_text
from llmtop.tui.commands.plan_load import CONTEXT, load_answer, load_text
from llmtop.tui.commands.plan_search import ROWS, parse_allow, sweep_text, where_text
from llmtop.tui.commands.plan_text import plan_text
from llmtop.tui.layering import check_raw_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--no-calibration", action="store_true", help="step time from the preset's figures alone"
    )
    asked = parser.add_argument_group("other questions")
    asked.add_argument(
        "--explain",
        metavar="WHEN",
        nargs="?",
        const=PEAK,
        help="each component as a formula with its numbers: at the peak, all, or one moment's name",
    )
    asked.add_argument(
        "--sweep",
        metavar="VALUES",
        help="predict every combination, as micro_batch=1..64,zero=0..3,attention=eager|sdpa: a..b doubles,"
        " or counts for zero; a..b+n counts by n",
    )
    asked.add_argument(
        "--rows", metavar="N", type=_whole, help=f"candidates of a sweep to print (default: {ROWS})"
    )
    asked.add_argument(
        "--where",
        action="store_true",
        help="for each kind of GPU the fewest that it fits on, and the fastest setting there",
    )
    asked.add_argument(
        "--allow", metavar="WORDS", help=f"with --where: search {', '.join(ALLOWED)} too (joined by commas)"
    )
    asked.add_argument(
        "--load",
        action="store_true",
        help="what the model needs to be loaded and asked: bf16, int8, nf4 and GGUF, with its cache",
    )
    asked.add_argument(
        "--context", metavar="N", type=_whole, help=f"with --load: tokens of a request (default: {CONTEXT})"
    )
    asked.add_argument("--requests", metavar="N", type=_whole, help="with --load: at a time (default: 1)")


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def run(args: argparse.Namespace) -> ExitCode:
    _recipe_after(args, "explain")
    _check_together(args)
    if args.sweep is not None:
        _sweep(args)
        return ExitCode.DONE
    if args.where:
        _where(args)
        return ExitCode.DONE
    if args.load:
        _load(args)
        return ExitCode.DONE
    spec = _on_this_machine(args, options.resolve_run(args))
    if args.explain is not None:
        _explain(spec, check_which(args.explain), as_json=args.json)
        return ExitCode.DONE
    prediction = predict_with_suggestions(spec)
    if args.json:
        print_json(answer(spec, prediction))
    else:
        print(plan_text(spec, prediction, text_width()))
    return ExitCode.DONE


def _on_this_machine(args: argparse.Namespace, spec: RunSpec) -> RunSpec:
    """With what `llmtop calibrate` has measured of this device."""
    return spec if args.no_calibration else calibrated(spec, find(spec))


def _recipe_after(args: argparse.Namespace, key: str) -> None:
    """A recipe may follow an option whose value may be left out."""
    value = getattr(args, key)
    if value is not None and value not in WHICH and args.recipe is None:
        args.recipe = value
        setattr(args, key, PEAK)


def _check_together(args: argparse.Namespace) -> None:
    """One question at a time, and no option of one that is not asked."""
    questions = ("explain", "sweep", "where", "load")
    asked = [f"--{key}" for key in questions if getattr(args, key) not in (None, False)]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} are different questions", fix="ask one at a time")
    for key, of in (("rows", "sweep"), ("allow", "where"), ("context", "load"), ("requests", "load")):
        if getattr(args, key) is not None and getattr(args, of) in (None, False):
            raise UsageError(f"--{key} is of --{of}", fix=f"give --{of} too, or leave --{key} out")


def _sweep(args: argparse.Namespace) -> None:
    axes = parse_axes(args.sweep)
    base = functools.partial(options.assemble_run, args)
    found = sweep(axes, lambda change: _checked(_on_this_machine(args, base(change)), axes))
    if args.json:
        print_json(found)
    else:
        print(sweep_text(found, args.rows or ROWS, text_width()))


def _checked(base: RunSpec, axes: Sequence[Axis]) -> RunSpec:
    """The base itself; raises UsageError for raw DeepSpeed keys in the sweep that a launch would refuse."""
    options.note_cpu(base)
    for axis in axes:
        for value in axis.values if "." in axis.key else ():
            spec = changed(base, {axis.key: value})
            if not refusals(spec):
                check_raw_keys(spec)
    return base


def _where(args: argparse.Namespace) -> None:
    allow = parse_allow(args.allow or "")
    _model_or_recipe(args)
    names = (catalog.load_gpu(args.gpu).name,) if "gpu" in args else gpu_names()
    found = where(lambda change: options.assemble_run(args, change), gpus=names, allow=allow)
    if args.json:
        print_json(found)
    else:
        print(where_text(found, text_width()))


def _model_or_recipe(args: argparse.Namespace) -> None:
    """Some questions are of a model as often as of a recipe."""
    if args.recipe is not None and catalog.has("models", args.recipe) and "model" not in args:
        args.model, args.recipe = args.recipe, None


def _load(args: argparse.Namespace) -> None:
    _model_or_recipe(args)
    spec, context, requests = options.assemble_run(args, {}), args.context or CONTEXT, args.requests or 1
    if args.json:
        print_json(load_answer(spec, context, requests))
    else:
        print(load_text(spec, context, requests, text_width()))


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
