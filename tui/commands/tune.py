"""`llmtop tune`: search for the fastest setting that fits, or for the largest size that does."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, JobFailedError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.devices import host_memory_bytes
from llmtop.profiler.memory.predict import predict
from llmtop.trainer.preflight import needs, preflight
from llmtop.trainer.tune import edge as edges
from llmtop.trainer.tune.journal import Asked, TuneDir, find_tune, tunes_root
from llmtop.trainer.tune.outcome import found
from llmtop.trainer.tune.search import LONGEST_SECONDS, Search
from llmtop.trainer.tune.space import Space, choice_of, knobs_of, space_of
from llmtop.trainer.tune.trial import run_trial, trial_spec
from llmtop.tui import options
from llmtop.tui.commands.output import print_json, text_width
from llmtop.tui.commands.tune_text import Progress, edge_text, found_text, ranked_text, space_text
from llmtop.tui.telling import tell

TRIALS, MINUTES = 12, 5.0
_EDGE_STEPS = 3
"""Of a trial for memory, which is steady after two."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_arguments(parser)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--fix",
        metavar="KEY[=VALUE]",
        action="append",
        default=[],
        help="keep an option as it is, or at a value",
    )
    search.add_argument(
        "--allow",
        metavar="KEY=V,V",
        action="append",
        default=[],
        help="the values that an option may take: zero, offload-optimizer, offload-param, micro-batch,"
        " checkpointing (none, all, every how many layers), attention, liger, buckets, or any other",
    )
    search.add_argument("--trials", metavar="N", type=_whole, help=f"runs at most (default: {TRIALS})")
    search.add_argument("--minutes", metavar="M", type=_positive, help=f"time at most (default: {MINUTES:g})")
    search.add_argument("--resume", metavar="ID", help="go on with a search: its id, or latest")
    search.add_argument("--dry-run", action="store_true", help="show what would be tried; starts nothing")
    largest = parser.add_mutually_exclusive_group()
    largest.add_argument("--max-batch", action="store_true", help="the largest micro-batch that fits instead")
    largest.add_argument("--max-length", action="store_true", help="the longest sequence that fits instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _whole(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < 1e6:
        raise ValueError(text)
    return number


def run(args: argparse.Namespace) -> ExitCode:
    if args.resume is not None:
        return _resume(args)
    spec = options.resolve_run(args)
    if args.max_batch or args.max_length:
        return _edge(spec, args)
    trials, minutes = args.trials or TRIALS, args.minutes or MINUTES
    asked = Asked(spec=spec, fix=tuple(args.fix), allow=tuple(args.allow), trials=trials, minutes=minutes)
    space = _space(asked, here=not args.dry_run)
    if args.dry_run:
        print_json(space) if args.json else print(f"{space_text(space, text_width())}\n{ranked_text(space)}")
        return ExitCode.DONE
    _require_candidates(space)
    preflight(trial_spec(spec))
    tune = TuneDir.create(tunes_root(), asked)
    return _search(tune, asked, space, trials, minutes, as_json=args.json)


def _resume(args: argparse.Namespace) -> ExitCode:
    """Options of the run are those that the search began with."""
    if args.recipe is not None or args.fix or args.allow or args.max_batch or args.max_length:
        raise UsageError(
            "--resume takes no recipe, --fix, --allow or other question",
            why="the search goes on as it was asked for",
            fix=f"llmtop tune --resume {args.resume}, with --trials and --minutes at most",
        )
    tune = find_tune(tunes_root(), args.resume)
    asked = tune.asked()
    space = _space(asked, here=True)
    trials, minutes = args.trials or asked.trials, args.minutes or asked.minutes
    return _search(tune, asked, space, trials, minutes, as_json=args.json)


def _space(asked: Asked, *, here: bool) -> Space:
    """`here`: leave out what this machine has not got."""
    spec = asked.spec
    return space_of(
        spec,
        knobs_of(spec, asked.fix, asked.allow),
        host_memory_bytes=host_memory_bytes() if here else None,
        lacks=_lacks if here else lambda _: "",
    )


def _lacks(spec: RunSpec) -> str:
    missing = next((need for need in needs(spec) if need.missing), None)
    return f"{missing.name} is not installed, and {missing.because}" if missing is not None else ""


def _require_candidates(space: Space) -> None:
    if space.candidates:
        return
    reason = next((f"{one.reason} ({one.why})" if one.why else one.reason for one in space.refused), "")
    raise UsageError(
        "nothing is left to try",
        why=f"{space.too_large:,} combinations are predicted not to fit"
        + (f"; most others are refused: {reason}" if reason else ""),
        fix="fix less, allow more (--allow offload_optimizer=cpu), or see llmtop plan for what makes it fit",
    )


def _search(
    tune: TuneDir, asked: Asked, space: Space, trials: int, minutes: float, *, as_json: bool
) -> ExitCode:
    tell(f"search {tune.tune_id} in {tune.path}\n{space_text(space, text_width())}")
    # A search that is resumed has a best already.
    best = min((line.step_seconds for line in tune.ended() if line.step_seconds), default=None)
    try:
        search = Search(tune, asked.spec, space, Progress(space, trials, best))
        stopped = search.run(trials, minutes)
    except KeyboardInterrupt:
        tell(f"every trial so far is kept: llmtop tune --resume {tune.tune_id}")
        raise
    result = found(tune, asked.spec, choice_of(asked.spec, space.knobs), stopped)
    if as_json:
        print_json(result)
    else:
        print(found_text(result, text_width()))
    if result.best is None:
        raise JobFailedError(
            f"search {tune.tune_id} measured nothing",
            why=result.trials[-1].reason if result.trials else stopped,
            fix=f"llmtop report {tune.trials_root / result.trials[-1].run}"
            if result.trials and result.trials[-1].run
            else "give it more --minutes",
        )
    return ExitCode.DONE


def _edge(spec: RunSpec, args: argparse.Namespace) -> ExitCode:
    quantity: edges.Quantity = "micro_batch" if args.max_batch else "seq_len"
    memory = predict(spec).device_memory_bytes
    if memory is None:
        raise UsageError(
            f"the memory of {spec.gpu.name} is not known", fix="--gpu with a preset (llmtop presets gpus)"
        )
    try_it = not args.dry_run and not spec.on_cpu
    if try_it:
        preflight(trial_spec(spec))
    probe = _prober(spec, quantity) if try_it else None
    edge = edges.edge_of(edges.need_of(spec, quantity), memory, quantity, probe)
    edge = _with_words(edge, spec, tried=try_it)
    if args.json:
        print_json(edge)
    else:
        print(edge_text(edge, text_width()))
    return ExitCode.DONE if edge.largest else ExitCode.DOES_NOT_FIT


def _with_words(edge: edges.Edge, spec: RunSpec, *, tried: bool) -> edges.Edge:
    words = ""
    if spec.on_cpu:
        words = (
            "predicted only: on the CPU the limit is the machine's memory, and a trial beyond it would take"
            " other programs with it"
        )
    elif not tried:
        words = "predicted only: --dry-run"
    elif not edge.probes:
        words = "predicted only: no trial gave an answer"
    return replace(edge, words=words)


def _prober(spec: RunSpec, quantity: edges.Quantity) -> Callable[[int], edges.Probe | None]:
    root = tunes_root() / "edges"

    def probe(size: int) -> edges.Probe | None:
        tell(f"trying {quantity} {size:,}")
        got = run_trial(
            trial_spec(edges.sized(spec, quantity, size), _EDGE_STEPS),
            root,
            LONGEST_SECONDS,
            best_step_seconds=None,
            show=_silent,
        )
        if got.outcome == "out_of_memory":
            return edges.Probe(size=size, fitted=False)
        if got.steps_finished < _EDGE_STEPS:
            tell(f"  no answer: {got.reason}")
            return None
        return edges.Probe(size=size, fitted=True, peak_bytes=got.peak_bytes)

    return probe


def _silent(state: RunState, left: float) -> None:
    """A trial for memory is over in a minute."""
