"""What the benchmarks of `tune` share: the cases, and one call with its machine, its rows and its time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.rows import Cell, RowLog
from benchmarks.session import machine_of
from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, Machine, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.trainer.tune.lacking import lacking
from llmtop.trainer.tune.nest import Nest
from llmtop.trainer.tune.space import Space, space_of
from llmtop.trainer.tune.trial import Start, run_trial, start_trial, trial_spec
from llmtop.trainer.tune.words import knobs_of
from llmtop.tui.commandline.telling import tell

_FIRST_SECONDS = 400.0
"""For the run before all others, which builds DeepSpeed's ops and fills the caches of the disk."""
_FIRST_STEPS = 4


class Case(Struct, frozen=True, kw_only=True):
    """What is searched: a recipe and what is given with it."""

    recipe: str
    values: Cell
    swept: tuple[str, ...]
    """`--allow` of the sweep; what is not named stays as it is in the recipe."""


_SWEPT = (
    "zero=0,1,2,3",
    "micro_batch=1,2,4,8",
    "checkpointing=none,all",
    "attention=sdpa,flash_attention_2",
    "liger=no,yes",
)
_EIGHT: Cell = {"micro_batch": 1, "grad_accum": 8}
CASES: dict[str, Case] = {
    "llama-1b": Case(recipe="full-zero2", values={"model": "llama-3.2-1b", **_EIGHT}, swept=_SWEPT),
    "qwen-0.5b": Case(recipe="full-zero2", values={"model": "qwen2.5-0.5b", **_EIGHT}, swept=_SWEPT),
    "llama-8b-lora": Case(recipe="lora", values={"model": "llama-3.1-8b", **_EIGHT}, swept=_SWEPT),
    "llama-8b": Case(recipe="full-zero3", values={"model": "llama-3.1-8b", **_EIGHT}, swept=_SWEPT),
    "llama-8b-8bit": Case(
        recipe="full-zero3",
        values={"model": "llama-3.1-8b", "optimizer": "adamw_8bit", **_EIGHT},
        swept=_SWEPT,
    ),
    "cpu": Case(
        recipe="cpu-demo",
        # With more threads each waits for the other, which other programs' load makes long.
        values={"micro_batch": 1, "grad_accum": 4, "threads_per_rank": 1},
        swept=("micro_batch=1,2,4", "checkpointing=none,all"),
    ),
}
"""On as many GPUs as `--gpus` says."""


def case_spec(name: str, gpus: int, machine: Machine) -> RunSpec:
    """What a search of the case begins with."""
    case = CASES[name]
    layers = recipe_layers(load_recipe(case.recipe))
    layers.append(Layer(ValueSource.COMMAND_LINE, "benchmark", {"gpus": gpus, **case.values}))
    return resolve(layers, name=name, machine=machine)


class Bench:
    """One call: where rows go, how long it may go on, how trials are started."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.machine: Machine = machine_of(options)
        self.log = RowLog(options.out)
        self._deadline = time.monotonic() + 60 * options.minutes
        self._warm: bool = options.built

    def left_seconds(self) -> float:
        left: float = self._deadline - time.monotonic()
        return left

    def spec(self, name: str) -> RunSpec:
        return case_spec(name, self.options.gpus, self.machine)

    def space(self, spec: RunSpec, fix: Sequence[str], allow: Sequence[str]) -> Space:
        return space_of(
            spec, knobs_of(spec, fix, allow), host_memory_bytes=host_memory_bytes(), lacks=lacking()
        )

    def warm_up(self, spec: RunSpec, root: Path) -> None:
        """Before the first trial of a call all that is built once is built."""
        if self._warm:
            return
        began = time.monotonic()
        run = trial_spec(spec, _FIRST_STEPS)
        got = run_trial(run, root, _FIRST_SECONDS, best_step_seconds=None, show=unseen, early=False)
        seconds = time.monotonic() - began
        print(f"ready after {seconds:.0f} s, {got.steps_finished} steps", flush=True)
        self._warm = True

    @contextmanager
    def starts(self, spec: RunSpec, root: Path) -> Iterator[Start]:
        """How a trial is started."""
        if self.options.fresh:
            yield start_trial
            return
        with Nest(trial_spec(spec), root / "nest.log", tell) as nest:
            nest.wait_ready()
            yield nest.start

    def cell(self, name: str, **more: Any) -> Cell:
        return {"case": name, "gpus": self.options.gpus, "gpu": self.machine.gpu, **more}


def unseen(state: RunState, left: float) -> None:
    """Nobody is shown it."""


def fixed(spec: RunSpec) -> list[str]:
    """What search and sweep leave alone: on a CPU neither says anything about a GPU."""
    return ["zero", "attention"] if spec.on_cpu else []
