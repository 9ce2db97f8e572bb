"""Time of a sweep of 50,000 candidates on one core, none of them refused.

    python benchmarks/sweep_speed.py [--out FILE]

Prints and appends one JSON line a recipe: seconds by the clock and of the processor for all candidates,
microseconds each, and the same as a multiple of hashing 64 KiB, which other machines can be compared by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import timeit
from pathlib import Path
from time import perf_counter, process_time

from benchmarks.predict_speed import spec_of
from llmtop.profiler.cost.sweep import parse_axes, sweep

RECIPES = ("full-zero2", "qlora-nf4")
ROUNDS = 3
GRIDS = {
    "full-zero2": (
        "micro_batch=1..50+1,grad_accum=1..25+1,zero=0..3,seq_len=1024|2048|4096|8192|16384,"
        "gradient_checkpointing=true|false"
    ),
    "qlora-nf4": (
        "micro_batch=1..50+1,grad_accum=1..25+1,zero=0|1|2|3,lora_rank=8|16|32|64|128,attention=eager|sdpa"
    ),
}
"""Of 50,000 candidates each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sweep_speed.jsonl")
    out: Path = parser.parse_args().out
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    block = bytes(65536)
    for recipe in RECIPES:
        spec = spec_of(recipe)
        axes = parse_axes(GRIDS[recipe])
        hashing = min(timeit.repeat(lambda: hashlib.sha256(block).digest(), number=2000, repeat=7)) / 2000
        rounds = []
        for _ in range(ROUNDS):
            began, began_cpu = perf_counter(), process_time()
            found = sweep(axes, lambda _, spec=spec: spec)  # type: ignore[misc]
            rounds.append((perf_counter() - began, process_time() - began_cpu))
        wall, cpu = min(rounds)
        row = {
            "recipe": recipe,
            "candidates": found.candidates,
            "predicted": len(found.rows),
            "fitting": found.fitting,
            "wall_seconds": round(wall, 3),
            "cpu_seconds": round(cpu, 3),
            "slowest_wall_seconds": round(max(rounds)[0], 3),
            "microseconds_each": round(cpu / found.candidates * 1e6, 1),
            "sha256_64kib_microseconds": round(hashing * 1e6, 1),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        print(json.dumps(row))
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as log:
            log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
