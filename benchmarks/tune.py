"""The search of `llmtop tune` against an exhaustive sweep over settings that it chooses from.

    python -m benchmarks.tune --cells llama-1b,qwen-0.5b,llama-8b-lora --minutes 9
    python -m benchmarks.tune --sweep llama-1b --minutes 9       # again until all of its settings have a row
    python -m benchmarks.tune --cells qwen-0.5b --then-sweep --built --minutes 9
    python -m benchmarks.tune --gpus 8 --cells llama-8b --minutes 9
    python -m benchmarks.tune --cpu; python -m benchmarks.tune --peer    # beside DeepSpeed's autotuner
    python -m benchmarks.tune --summary benchmarks/results/tune.jsonl

A search is a row with all of its trials. It chooses from everything that `llmtop tune` varies by itself. A
sweep is a row for each setting: what the search found, what it began with, then the settings of `_SWEPT` from
the fastest predicted on, each measured as a trial is. `--summary` judges a search by its sweep alone, which
measured both.
Rows are added as they come and none is made twice, so calls go on where the last one was cut off.
"""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.rows import Cell, Row, RowLog, read_rows
from benchmarks.session import RESULTS, machine_of, run_main
from benchmarks.tune_peer import autotune, peer_text, rate
from llmtop.presets.catalog import load_recipe
from llmtop.presets.errors import UsageError
from llmtop.presets.resolve import Layer, Machine, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.cost.sweep import changed
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.trainer.tune.interrupt import interruptible
from llmtop.trainer.tune.journal import Asked, Line, TuneDir
from llmtop.trainer.tune.lacking import lacking
from llmtop.trainer.tune.nest import Nest
from llmtop.trainer.tune.outcome import found
from llmtop.trainer.tune.search import Search
from llmtop.trainer.tune.space import Candidate, Space, choice_of, key_of, space_of
from llmtop.trainer.tune.trial import Start, run_trial, start_trial, trial_spec
from llmtop.trainer.tune.words import knobs_of
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.tune_text import Progress

GOAL_FOUND, GOAL_START, GOAL_TRIALS, GOAL_MINUTES = 0.98, 1.22, 12, 5.0
_FIRST_SECONDS = 400.0
"""For the run before all others, which builds DeepSpeed's ops and fills the caches of the disk."""
_FIRST_STEPS = 4
_PEER_ROUNDS = 3
_TRIAL_SECONDS = 120.0
_OVERTIME_SECONDS = 50.0
"""Beyond a call's minutes, for the trial that is under way."""


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
        case = CASES[name]
        values = {"gpus": self.options.gpus, **case.values}
        layers = recipe_layers(load_recipe(case.recipe))
        layers.append(Layer(ValueSource.COMMAND_LINE, "benchmark", values))
        return resolve(layers, name=name, machine=self.machine)

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
        got = run_trial(run, root, _FIRST_SECONDS, best_step_seconds=None, show=_unseen, early=False)
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


def _unseen(state: RunState, left: float) -> None:
    """Nobody is shown it."""


# --- the search -----------------------------------------------------------------------------------


def search(bench: Bench, name: str, root: Path) -> None:
    """One search as `llmtop tune` makes it, imports included; a row."""
    options = bench.options
    cell = bench.cell(name, kind="search", fresh=options.fresh)
    if cell in bench.log:
        return
    needed = 60 * options.search_minutes + 60
    if bench.left_seconds() < needed:
        print(f"{name}: no time left for a search, call again", flush=True)
        return
    spec = bench.spec(name)
    fix = fixed(spec)
    space = bench.space(spec, fix, [])
    tune = TuneDir.create(root, Asked(spec=spec, fix=tuple(fix)))
    bench.warm_up(spec, root)
    began = time.monotonic()
    with tune.held(), bench.starts(spec, tune.path) as start:
        ready = time.monotonic() - began
        teller = Progress(space, options.trials)
        try:
            stopped = Search(tune, spec, space, teller, start=start).run(
                options.trials, options.search_minutes, began=began
            )
        except BaseException as error:
            # The cell stays open, but what was measured is not lost.
            trials = [msgspec.to_builtins(line) for line in tune.ended()]
            bench.log.add({"cell": {**cell, "kind": "cut off"}, "why": [repr(error)], "trials": trials})
            raise
    result = found(tune, spec, choice_of(spec, space.knobs), stopped)
    best, began_with = result.best, result.start
    bench.log.add(
        {
            "cell": cell,
            "minutes": round((time.monotonic() - began) / 60, 2),
            "ready_seconds": round(ready, 1),
            "runs": result.runs,
            "lost": result.lost,
            "out_of_memory": sum(line.outcome == "out_of_memory" for line in tune.ended()),
            "candidates": len(space.candidates),
            "combinations": space.size,
            "stopped": stopped,
            "why": list(result.why),
            "found": best.choice if best is not None else None,
            "found_change": best.change if best is not None else None,
            "start": choice_of(spec, space.knobs),
            "found_over_start": _ratio(_step(began_with), _step(best)),
            "trials": [msgspec.to_builtins(line) for line in tune.ended()],
        }
    )
    print("\n".join(result.why), flush=True)


def _step(line: Line | None) -> float | None:
    return line.step_seconds if line is not None else None


# --- the sweep ------------------------------------------------------------------------------------


def sweep(bench: Bench, name: str, root: Path) -> None:
    """Rows of the settings that have none yet, while there is time."""
    spec = bench.spec(name)
    candidates = list(swept_settings(bench, name, spec))
    todo = [one for one in candidates if bench.cell(name, kind="setting", choice=one.choice) not in bench.log]
    print(f"{name}: {len(candidates)} settings, {len(todo)} without a row", flush=True)
    if not todo:
        return
    bench.warm_up(spec, root)
    with bench.starts(spec, root) as start:
        for number, one in enumerate(todo, 1):
            if bench.left_seconds() < 0:
                print(f"{len(todo) - number + 1} settings without a row yet, call again", flush=True)
                return
            seconds = min(_TRIAL_SECONDS, bench.left_seconds() + _OVERTIME_SECONDS)
            run = trial_spec(changed(spec, one.change))
            # What is far behind needs no more steps to be told so.
            best = min(times_of(read_rows(bench.options.out), bench.cell(name)).values(), default=None)
            got = run_trial(run, root / "sweep", seconds, best_step_seconds=best, show=_unseen, start=start)
            shutil.rmtree(root / "sweep", ignore_errors=True)
            if got.outcome == "timeout" and seconds < _TRIAL_SECONDS:
                return
            row = {"predicted_step_seconds": one.brief.step_seconds, "settings": len(candidates)}
            cell = bench.cell(name, kind="setting", choice=one.choice)
            bench.log.add({"cell": cell, **row, **msgspec.to_builtins(got)})
            step = "n/a" if got.step_seconds is None else f"{got.step_seconds:.4f} s"
            words = f"{number}/{len(todo)} {got.outcome} {step} {key_of(one.choice)} {got.reason}"
            print(words[:300], flush=True)


def fixed(spec: RunSpec) -> list[str]:
    """What search and sweep leave alone: on a CPU neither says anything about a GPU."""
    return ["zero", "attention"] if spec.on_cpu else []


def swept_settings(bench: Bench, name: str, spec: RunSpec) -> Iterator[Candidate]:
    """What the search found and began with, then the rest of the sweep, the fastest predicted first."""
    fix = fixed(spec)
    knobs = {word.partition("=")[0] for word in CASES[name].swept}
    usual = bench.space(spec, fix, [])
    kept = [knob.key for knob in usual.knobs if knob.key not in knobs and knob.key not in fix]
    narrowed = bench.space(spec, [*fix, *kept], CASES[name].swept)
    rows = [row for row in read_rows(bench.options.out) if row["cell"].get("kind") == "search"]
    known = {one.key: one for one in (*usual.candidates, *narrowed.candidates)}
    wanted = [
        key_of(choice)
        for row in rows
        if (row["cell"]["case"], row["cell"]["gpus"]) == (name, bench.options.gpus)
        for choice in (row["found"], row["start"])
        if choice
    ]
    keys = dict.fromkeys([*wanted, *(one.key for one in narrowed.candidates)])
    yield from (known[key] for key in keys if key in known)


# --- beside DeepSpeed's own autotuner -------------------------------------------------------------


def peer(bench: Bench, name: str, root: Path) -> None:
    """The same case by the autotuner, after a search of ours; a row that compares both."""
    cell = bench.cell(name, kind="peer")
    rows = {
        row["cell"].get("kind"): row for row in read_rows(bench.options.out) if row["cell"]["case"] == name
    }
    if cell in bench.log:
        return
    if "search" not in rows:
        raise UsageError(
            f"{name} has no search to compare with", fix=f"--cells {name} first, with this --out"
        )
    spec, ours = bench.spec(name), rows["search"]
    theirs = autotune(spec, root / "peer", bench.left_seconds())
    given = {key: theirs[key] for key in ("micro_batch", "grad_accum", "zero")}
    with bench.starts(spec, root) as start:
        settings = {"ours": ours["found_change"], "theirs": given, "start": {}}
        rates = {
            who: [rate(spec, change, root / "peer-trials", start) for _ in range(_PEER_ROUNDS)]
            for who, change in settings.items()
        }
    bench.log.add(
        {
            "cell": cell,
            "theirs": theirs,
            "ours": {key: ours[key] for key in ("minutes", "runs", "found_change")},
            "global_batch": spec.global_batch,
            "their_global_batch": theirs["micro_batch"] * theirs["grad_accum"] * spec.world_size,
            "tokens_per_second": rates,
        }
    )
    print(peer_text(read_rows(bench.options.out)[-1]), flush=True)


# --- the judgement --------------------------------------------------------------------------------


def swept_rows(rows: Sequence[Row], cell: Cell) -> list[Row]:
    """The rows of the settings that were swept for a cell's case."""
    same = ("case", "gpus", "gpu")
    of_settings = (row for row in rows if row["cell"].get("kind") == "setting")
    return [row for row in of_settings if all(row["cell"][key] == cell[key] for key in same)]


def times_of(rows: Sequence[Row], cell: Cell) -> dict[str, float]:
    """Seconds of a step of each of them that was measured to its end, and not cut for being far behind."""
    measured = (row for row in swept_rows(rows, cell) if row["outcome"] == "measured")
    return {key_of(row["cell"]["choice"]): row["step_seconds"] for row in measured}


def judged(rows: Sequence[Row]) -> Iterator[Row]:
    """Each search beside what the sweep of its case measured."""
    for row in rows:
        cell = row["cell"]
        if cell.get("kind") != "search":
            continue
        times = times_of(rows, cell)
        best = min(times.values(), default=None)
        own = times.get(key_of(row["found"])) if row["found"] else None
        start = times.get(key_of(row["start"])) if row["start"] else None
        yield {
            **cell,
            "found_over_best": _ratio(best, own),
            "found_over_start": _ratio(start, own) or row["found_over_start"],
            "swept": len(swept_rows(rows, cell)),
            **{key: row[key] for key in ("runs", "minutes", "lost", "out_of_memory", "found")},
        }


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 4) if above and below else None


def summary(rows: Sequence[Row]) -> str:
    lines = [peer_text(row) for row in rows if row["cell"].get("kind") == "peer"]
    for one in judged(rows):
        how = ", imports in each trial" if one.get("fresh") else ""
        lines.append(f"{one['case']} on {one['gpus']} {one['gpu']}{how}")
        lines.append(
            f"  {_times(one['found_over_best'])} of the best of {one['swept']} swept (goal {GOAL_FOUND}),"
            f" {_times(one['found_over_start'])} of the start (goal {GOAL_START} somewhere)"
        )
        lines.append(
            f"  {one['runs']} trials (goal {GOAL_TRIALS}), {one['minutes']} minutes (goal {GOAL_MINUTES:g}),"
            f" {one['lost']} lost, {one['out_of_memory']} to memory (goal 0)"
        )
    return "\n".join(lines) or "no searches"


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.3f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", default="", metavar="NAMES", help=f"searches: {', '.join(CASES)}")
    parser.add_argument("--sweep", default="", metavar="NAMES", help="sweeps of these instead")
    parser.add_argument(
        "--then-sweep", action="store_true", help="after each search its sweep, in the minutes left"
    )
    parser.add_argument(
        "--built", action="store_true", help="DeepSpeed's ops are built: no run before the first"
    )
    parser.add_argument("--peer", action="store_true", help="DeepSpeed's autotuner on the case cpu instead")
    parser.add_argument("--cpu", action="store_true", help="the case cpu, whatever devices there are")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--trials", type=int, default=GOAL_TRIALS)
    parser.add_argument("--search-minutes", type=float, default=GOAL_MINUTES, help="of each search")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; nothing begins later")
    parser.add_argument("--fresh", action="store_true", help="each trial loads its libraries itself")
    parser.add_argument("--summary", type=Path, help="only say what a file of rows holds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.summary is not None:
        print(summary(read_rows(options.summary)))
        return
    options.cpu = options.cpu or options.peer
    options.out = options.out or RESULTS / ("tune_cpu.jsonl" if options.cpu else "tune.jsonl")
    acts = [peer] if options.peer else [sweep] if options.sweep else [search]
    if options.then_sweep and not options.peer and not options.sweep:
        acts.append(sweep)
    names = (options.sweep or options.cells or ("cpu" if options.cpu else "llama-1b")).split(",")
    bench = Bench(options)
    faulthandler.dump_traceback_later(60 * options.minutes + _FIRST_SECONDS, repeat=True)
    root = Path(tempfile.mkdtemp(prefix="llmtop-tune-"))
    try:
        with interruptible():
            for name in names:
                for act in acts:
                    act(bench, name, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(summary(read_rows(options.out)))


if __name__ == "__main__":
    run_main(main)
