"""`llmtop tune --max-batch` and `--max-length`: the largest size that fits."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import judge
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.predict import predict
from llmtop.trainer.preflight import preflight
from llmtop.trainer.tune import edge as edges
from llmtop.trainer.tune.edgefolder import edge_folder
from llmtop.trainer.tune.interrupt import interruptible
from llmtop.trainer.tune.journal import tunes_root
from llmtop.trainer.tune.nest import Nest
from llmtop.trainer.tune.search import LONGEST_SECONDS
from llmtop.trainer.tune.trial import Start, run_trial, trial_spec
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.output import print_json, text_width
from llmtop.tui.commands.tune_text import edge_text
from llmtop.tui.commands.wayout import best_way

_STEPS = 3
"""Of a trial for memory, which is steady after two."""
_OF_A_SEARCH = ("fix", "allow", "trials", "minutes")


def find_edge(spec: RunSpec, args: argparse.Namespace) -> ExitCode:
    """Answer the question, by trials where this machine can be used for them."""
    _refuse_words_of_a_search(args)
    quantity: edges.Quantity = "micro_batch" if args.max_batch else "seq_len"
    memory = predict(spec).device_memory_bytes
    if memory is None:
        raise UsageError(
            f"the memory of {spec.gpu.name} is not known", fix="--gpu with a preset (llmtop presets gpus)"
        )
    judge(spec, {})  # what is known to fail at any size is told as what it is
    need = edges.need_of(spec, quantity)
    try_it = not args.dry_run and not spec.on_cpu
    with ExitStack() as stack:
        probe = None
        if try_it:
            preflight(trial_spec(spec))
            stack.enter_context(interruptible())
            root = stack.enter_context(edge_folder(tunes_root() / "edges"))
            nest = stack.enter_context(Nest(trial_spec(spec), root / "nest.log", tell))
            nest.wait_ready()
            probe = _Prober(spec, quantity, root, nest.start)
        edge = edges.edge_of(need, memory, quantity, probe)
    edge = _with_words(edge, spec, tried=try_it)
    if args.json:
        print_json(edge)
    else:
        print(edge_text(edge, text_width()))
    return ExitCode.DONE if edge.largest else ExitCode.DOES_NOT_FIT


def _refuse_words_of_a_search(args: argparse.Namespace) -> None:
    for word in _OF_A_SEARCH:
        if getattr(args, word):
            raise UsageError(
                f"--{word} goes with a search for the fastest setting",
                why=f"{'--max-batch' if args.max_batch else '--max-length'} changes nothing but the size,"
                f" in {edges.TRIALS} trials at most",
                fix=f"leave --{word} out; an option that is to be another is given itself, as --zero 3",
            )


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
    if not edge.largest:
        smallest: dict[str, int] = {"micro_batch": 1} if edge.quantity == "micro_batch" else {}
        changed = replace(spec, options=replace(spec.options, **smallest))
        words = "; ".join(filter(None, (words, best_way(changed, spec, smallest))))
    return replace(edge, words=words)


class _Prober:
    """Tries a size for real."""

    def __init__(self, spec: RunSpec, quantity: edges.Quantity, root: Path, start: Start) -> None:
        self._spec = spec
        self._quantity = quantity
        self._root = root
        self._start = start

    def __call__(self, size: int) -> edges.Probe | None:
        """None for a trial that tells nothing."""
        tell(f"trying {self._quantity} {size:,}")
        got = run_trial(
            trial_spec(edges.sized(self._spec, self._quantity, size), _STEPS),
            self._root,
            LONGEST_SECONDS,
            best_step_seconds=None,
            show=_silent,
            start=self._start,
            early=False,
        )
        if got.outcome == "out_of_memory":
            return edges.Probe(size=size, fitted=False)
        if got.steps_finished < _STEPS:
            tell(f"  no answer: {got.reason}")
            return None
        return edges.Probe(size=size, fitted=True, peak_bytes=got.peak_bytes)


def _silent(state: RunState, left: float) -> None:
    """A trial for memory is over in a minute."""
