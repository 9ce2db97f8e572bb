"""`llmtop plan`: predict a run, explain that, or search for another; without a GPU and without torch.

What only some of the questions need is imported where they are answered: a plain plan is there at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from llmtop.presets.cautions import cautions
from llmtop.presets.errors import ExitCode, PackedWeightsError, UsageError
from llmtop.presets.inputs import inputs
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.calibration import with_calibration
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.memory.result import MOMENT_WORDS, Prediction, is_short
from llmtop.profiler.units import format_bytes
from llmtop.tui.commandline import options
from llmtop.tui.commandline.arguments import count
from llmtop.tui.commandline.layering import check_raw_keys
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json, text_width, wrapped
from llmtop.tui.commands.plan_defaults import CONTEXT, PEAK, ROWS
from llmtop.tui.commands.plan_text import plan_text, verdict_line

if TYPE_CHECKING:
    from llmtop.profiler.cost.sweep import Axis, SweepRow


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
        "--rows", metavar="N", type=count, help=f"candidates of a sweep to print (default: {ROWS})"
    )
    asked.add_argument(
        "--where",
        action="store_true",
        help="for each kind of GPU the fewest that it fits on, or --gpus of it, and the fastest setting",
    )
    asked.add_argument(
        "--allow", metavar="WORDS", help="with --where: search offload, 8bit, liger too (joined by commas)"
    )
    asked.add_argument(
        "--load",
        action="store_true",
        help="what the model needs to be loaded and to answer: bf16, int8, nf4 and GGUF, with its cache",
    )
    asked.add_argument(
        "--context", metavar="N", type=count, help=f"with --load: tokens of a request (default: {CONTEXT})"
    )
    asked.add_argument("--requests", metavar="N", type=count, help="with --load: at a time (default: 1)")


def run(args: argparse.Namespace) -> ExitCode:
    _recipe_after_explain(args)
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
        _explain(spec, args.explain, as_json=args.json)
        return ExitCode.DONE
    prediction = predict_with_suggestions(spec)
    if args.json:
        print_json(answer(spec, prediction))
        return ExitCode.DONE
    limit = _host_limit(spec, prediction)
    print(plan_text(spec, prediction, text_width(), limit))
    if sys.stdout.isatty():
        # The answer is longer than most screens, whose last lines are those that are seen.
        print("\n" + "\n".join(verdict_again(spec, prediction, text_width(), limit)))
    return ExitCode.DONE


_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""One of them is there wherever a GPU can be used; the second is that of Windows' Linux."""


def _host_limit(spec: RunSpec, prediction: Prediction | None = None) -> int | None:
    """What the run can use of this machine's memory, where it would be on it. None for what its `prediction`
    needs no more than, where that is given. Most plans are of another machine, and load nothing for it."""
    if spec.on_cpu or not any(map(os.path.exists, _DRIVERS)):
        return None
    from llmtop.profiler.hardware.hostroom import host_limit, limit_if_short

    return host_limit(spec) if prediction is None else limit_if_short(spec, prediction)


def verdict_again(
    spec: RunSpec, prediction: Prediction, width: int, host_limit_bytes: int | None = None
) -> list[str]:
    """Verdict and peak, to end with."""
    peak = format_bytes(prediction.peak_allocated_bytes)
    moment = MOMENT_WORDS[prediction.peak_moment]
    verdict = verdict_line(spec, prediction, host_limit_bytes)
    return wrapped(f"{verdict}; peak {peak} ({moment})", "", width)


def _on_this_machine(args: argparse.Namespace, spec: RunSpec) -> RunSpec:
    """With what `llmtop calibrate` has measured of this device."""
    return spec if args.no_calibration else with_calibration(spec)


def _recipe_after_explain(args: argparse.Namespace) -> None:
    """A recipe may follow the option whose value may be left out."""
    if args.explain is None or args.recipe is not None:
        return
    from llmtop.tui.commands.plan_explain import WHICH

    if args.explain not in WHICH:
        args.recipe, args.explain = args.explain, PEAK


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
    from llmtop.profiler.cost.sweep import parse_axes, sweep
    from llmtop.tui.commands.plan_search import sweep_text

    axes = parse_axes(args.sweep)

    def base(change: Mapping[str, Any]) -> RunSpec:
        return _checked(_on_this_machine(args, options.assemble_run(args, change)), axes)

    found = sweep(axes, base)
    if args.json:
        print_json(found)
        return
    print(sweep_text(found, args.rows or ROWS, text_width()))
    if found.rows and not found.fitting:
        way = _way_of_the_nearest(found.rows[0], base)
        print("\n".join(wrapped(f"of the first, {way}" if way else "", "", text_width())))


def _way_of_the_nearest(row: SweepRow, base: Callable[[Mapping[str, Any]], RunSpec]) -> str:
    """Of the candidate that is the nearest to fitting, where none of them fits."""
    from llmtop.profiler.cost.sweep import BASE_KEYS, changed
    from llmtop.tui.commands.wayout import best_way

    own = {key: value for key, value in row.settings.items() if key in BASE_KEYS}
    typed = " ".join(options.option_text(key, value) for key, value in own.items())
    inner = {key: value for key, value in row.settings.items() if key not in BASE_KEYS}
    asked = base(own)
    return best_way(changed(asked, inner), asked, inner, typed)


def _checked(base: RunSpec, axes: Sequence[Axis]) -> RunSpec:
    """The base itself; raises UsageError for raw DeepSpeed keys in the sweep that a launch would refuse."""
    from llmtop.presets.rules import refusals
    from llmtop.profiler.cost.sweep import changed

    options.note_cpu(base)
    for axis in axes:
        for value in axis.values if "." in axis.key else ():
            spec = changed(base, {axis.key: value})
            if not refusals(spec):
                check_raw_keys(spec)
    return base


def _where(args: argparse.Namespace) -> None:
    from llmtop.presets.catalog import load_gpu
    from llmtop.profiler.cost.where import gpu_names, where
    from llmtop.tui.commands.plan_search import parse_allow, where_text

    allow = parse_allow(args.allow or "")
    names = (load_gpu(args.gpu).name,) if "gpu" in args else gpu_names()
    found = where(lambda change: options.assemble_run(args, change), gpus=names, allow=allow)
    if args.json:
        print_json(found)
    else:
        print(where_text(found, text_width()))


def _load(args: argparse.Namespace) -> None:
    from llmtop.tui.commands.plan_load import load_answer, load_text

    spec, context, requests = _to_load(args), args.context or CONTEXT, args.requests or 1
    if args.json:
        print_json(load_answer(spec, context, requests))
    else:
        print(load_text(spec, context, requests, text_width()))


def _to_load(args: argparse.Namespace) -> RunSpec:
    """What is packed already has a shape too, which is all that is asked for."""
    try:
        return options.assemble_run(args, {})
    except PackedWeightsError as packed:
        tell(f"note: {packed.what}; all that follows is computed from its shape")
        return options.assemble_run(args, {"model": str(packed.config)})


def _explain(spec: RunSpec, which: str, *, as_json: bool) -> None:
    from llmtop.profiler.memory.explain import explain
    from llmtop.tui.commands.plan_explain import check_which, explain_text

    check_which(which)
    explanation = explain(spec)
    if as_json:
        print_json({"explanation": explanation, "spec": spec})
    else:
        print(explain_text(spec, explanation, which, text_width()))


def answer(spec: RunSpec, prediction: Prediction) -> dict[str, Any]:
    """The answer of `plan --json`: the prediction, and the run that it is of."""
    limit = _host_limit(spec)
    return {
        **msgspec.to_builtins(prediction),
        "host_fits": None if limit is None else not is_short(prediction.host_bytes, limit),
        "cautions": cautions(spec),
        "inputs": inputs(spec),
        "spec": spec,
    }
