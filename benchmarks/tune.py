"""The search of `llmtop tune` against an exhaustive sweep over the same settings.

    python -m benchmarks.tune [--cpu] [--model NAME] [--gpus N] [--fix KEY[=V] ...] [--allow KEY=V,V ...]
        [--trials 12] [--minutes 5] [--sweep-minutes 60] [--out FILE]

Appends one JSON line: found/best by the sweep's own measurement of both, trials, minutes, lost trials. The
search runs first, then every setting that may fit is measured once more, each in fresh processes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import RowLog
from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.cost.sweep import changed
from llmtop.profiler.hardware.devices import detect_machine
from llmtop.trainer.preflight import needs
from llmtop.trainer.tune.journal import Asked, Line, TuneDir
from llmtop.trainer.tune.search import LONGEST_SECONDS, Search
from llmtop.trainer.tune.space import Space, choice_of, key_of, space_of
from llmtop.trainer.tune.trial import Measured, run_trial, trial_spec
from llmtop.trainer.tune.words import knobs_of
from llmtop.tui.commands.tune_text import Progress

CPU_FIX = ("zero", "attention")


def start_spec(args: argparse.Namespace) -> RunSpec:
    values: dict[str, Any] = {
        "gpus": args.gpus,
        "micro_batch": args.micro_batch,
        "grad_accum": args.grad_accum,
    }
    layers = list(recipe_layers(load_recipe("cpu-demo" if args.cpu else "full-zero2")))
    if args.model:
        values["model"] = args.model
    layers.append(Layer(ValueSource.COMMAND_LINE, "benchmark", values))
    return resolve(layers, name="tune", machine=detect_machine())


def swept(spec: RunSpec, space: Space, root: Path, minutes: float) -> dict[str, Measured]:
    """Every setting once, until the time is up."""
    deadline = time.monotonic() + 60 * minutes
    found: dict[str, Measured] = {}
    for one in space.candidates:
        if time.monotonic() > deadline:
            break
        run = trial_spec(changed(spec, one.change))
        got = run_trial(run, root, LONGEST_SECONDS, best_step_seconds=None, show=lambda state, left: None)
        found[one.key] = got
        print(
            f"sweep {len(found)}/{len(space.candidates)} {one.key}: {got.outcome} {got.step_seconds}",
            flush=True,
        )
    return found


def row_of(
    space: Space, trials: list[Line], minutes: float, sweep: dict[str, Measured], start: str
) -> dict[str, Any]:
    times = {key: got.step_seconds for key, got in sweep.items() if got.step_seconds}
    measured = sorted((t for t in trials if t.step_seconds), key=lambda t: t.step_seconds or 0.0)
    found = key_of(measured[0].choice) if measured else None
    best = min(times, key=lambda key: times[key]) if times else None
    ratio = times[best] / times[found] if best and found in times else None
    return {
        "found": found,
        "best": best,
        "found_over_best": round(ratio, 4) if ratio else None,
        "found_over_start": round(times[start] / times[found], 3)
        if found in times and start in times
        else None,
        "trials": len(trials),
        "minutes": round(minutes, 2),
        "lost": sum(t.step_seconds is None for t in trials),
        "settings": len(space.candidates),
        "swept": len(sweep),
        "sweep_seconds": {key: round(value, 4) for key, value in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--grad-accum", type=int, default=8)
    parser.add_argument("--fix", action="append", default=[])
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--sweep-minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    spec = start_spec(args)
    fix = args.fix or (list(CPU_FIX) if args.cpu else [])
    knobs = knobs_of(spec, fix, args.allow)
    space = space_of(spec, knobs, lacks=lambda run: next((n.name for n in needs(run) if n.missing), ""))
    with tempfile.TemporaryDirectory() as folder:
        tune = TuneDir.create(Path(folder), Asked(spec=spec, fix=tuple(fix), allow=tuple(args.allow)))
        began = time.monotonic()
        Search(tune, spec, space, Progress(space, args.trials)).run(args.trials, args.minutes)
        minutes = (time.monotonic() - began) / 60
        sweep = swept(spec, space, Path(folder) / "sweep", args.sweep_minutes)
        start = key_of(choice_of(spec, knobs))
        row = row_of(space, tune.ended(), minutes, sweep, start)
    cell = {
        "model": spec.model.name,
        "gpu": spec.gpu.name,
        "gpus": spec.options.gpus,
        "start": start,
        "fix": fix,
    }
    out = args.out or Path(__file__).parent / "results" / ("tune_cpu.jsonl" if args.cpu else "tune.jsonl")
    RowLog(out).add({"cell": cell, **row})
    print(row)


if __name__ == "__main__":
    main()
