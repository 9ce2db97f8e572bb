"""The search of `llmtop tune` against an exhaustive sweep over settings that it chooses from.

    python -m benchmarks.tune --cells llama-1b,qwen-0.5b,llama-8b-lora --minutes 9
    python -m benchmarks.tune --sweep llama-1b --minutes 9       # again until all of its settings have a row
    python -m benchmarks.tune --sweep llama-1b --live            # the same in few runs, changed live
    python -m benchmarks.tune --cells qwen-0.5b --then-sweep --built --minutes 9
    python -m benchmarks.tune --gpus 8 --cells llama-8b --minutes 9
    python -m benchmarks.tune --cpu; python -m benchmarks.tune --peer    # beside DeepSpeed's autotuner
    python -m benchmarks.tune --summary benchmarks/results/tune.jsonl

A search is a row with all of its trials. It chooses from everything that `llmtop tune` varies by itself. A
sweep is a row for each setting: what the search found, what it began with, then the settings of `_SWEPT` from
the fastest predicted on, each measured as a trial is, or with `--live` between two changes of a run that goes
on. `--summary` judges a search by its sweep alone, which measured both.
Rows are added as they come and none is made twice, so calls go on where the last one was cut off.
"""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.rows import read_rows
from benchmarks.session import RESULTS, run_main
from benchmarks.tune_bench import CASES, Bench, fixed
from benchmarks.tune_peer import autotune, peer_text, rate
from benchmarks.tune_summary import GOAL_MINUTES, GOAL_TRIALS, ratio, summary
from benchmarks.tune_sweep import sweep
from llmtop.presets.errors import UsageError
from llmtop.trainer.tune.interrupt import interruptible
from llmtop.trainer.tune.journal import Asked, Line, TuneDir
from llmtop.trainer.tune.outcome import found
from llmtop.trainer.tune.search import Search
from llmtop.trainer.tune.space import choice_of
from llmtop.tui.commands.tune_text import Progress

_PEER_ROUNDS = 3
_HANG_SECONDS = 400.0


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
            "found_over_start": ratio(_step(began_with), _step(best)),
            "trials": [msgspec.to_builtins(line) for line in tune.ended()],
        }
    )
    print("\n".join(result.why), flush=True)


def _step(line: Line | None) -> float | None:
    return line.step_seconds if line is not None else None


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
    parser.add_argument("--live", action="store_true", help="sweep in runs that are changed live")
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
    faulthandler.dump_traceback_later(60 * options.minutes + _HANG_SECONDS, repeat=True)
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
