"""Harm done to runs, and what is left of them; writes `docs/reliability.md` from what was recorded.

    python -m benchmarks.reliability --kills 200 --power-cuts 200 [--seed 10]
    python -m benchmarks.reliability --soak [--hours 24]       a recorded day in the viewer, 100,000 steps
    python -m benchmarks.reliability --real-steps 200000       a rank that trains so long, on the CPU
    python -m benchmarks.reliability --tests                   the tests of the table of faults
    python -m benchmarks.reliability --document                the page, from the results

Each part replaces its rows in `results/reliability.jsonl`. Runs are real ones of two ranks on the CPU, forked
from a process that has the libraries loaded. The seed decides targets and moments; where in a run a moment
falls depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "reliability.jsonl"
Row = dict[str, Any]


def keep(part: str, rows: Iterator[Row], results: Path) -> list[Row]:
    """Put them in the place of the rows of the same part; each is printed as it comes."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    made: list[Row] = []
    for row in rows:
        stamp = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "load": round(os.getloadavg()[0], 2),
        }
        made.append({"part": part, **row, **stamp, **machine})
        print(json.dumps(made[-1]), flush=True)
    others = [line for line in _lines(results) if json.loads(line)["part"] != part]
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("".join(f"{line}\n" for line in [*others, *map(json.dumps, made)]))
    return made


def _lines(results: Path) -> list[str]:
    return results.read_text().splitlines() if results.exists() else []


def harm(root: Path, kill_count: int, cut_count: int, seed: int, results: Path) -> None:
    from benchmarks.reliability.kills import kills
    from benchmarks.reliability.powercut import power_cuts
    from benchmarks.reliability.runs import tiny_spec
    from llmtop.trainer.tune.nest import Nest

    with Nest(tiny_spec(), root / "nest.log", print) as nest:
        nest.wait_ready()
        if kill_count:
            keep("kills", kills(nest, root, kill_count, seed), results)
        if cut_count:
            keep("power cuts", power_cuts(nest, root, cut_count, seed), results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="runs with one SIGKILL each")
    parser.add_argument("--power-cuts", type=int, default=0, metavar="N", help="cut copies of live runs")
    parser.add_argument("--soak", action="store_true", help="a recorded day through fold and viewer")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--real-steps", type=int, default=0, metavar="N", help="of one rank that trains")
    parser.add_argument("--tests", action="store_true", help="run the tests that the table of faults names")
    parser.add_argument("--document", action="store_true", help="write docs/reliability.md")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmtop-reliability-") as name:
        root = Path(name)
        if args.kills or args.power_cuts:
            harm(root, args.kills, args.power_cuts, args.seed, args.out)
        if args.soak:
            from benchmarks.reliability.manysteps import fast_ranks
            from benchmarks.reliability.soak import day

            keep("soak", chain(day(root, args.hours), fast_ranks(root)), args.out)
        if args.real_steps:
            from benchmarks.reliability.manysteps import real_rank

            keep("real steps", real_rank(root, args.real_steps), args.out)
    if args.tests:
        from benchmarks.reliability.faults import run_tests

        keep("tests", run_tests(), args.out)
    if args.document:
        from benchmarks.reliability.document import write

        write(args.out)


if __name__ == "__main__":
    main()
