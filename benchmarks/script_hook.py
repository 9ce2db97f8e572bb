"""What watching costs a training script of the user's own: Python's start, and a step.

    python -m benchmarks.script_hook [--starts 40] [--rounds 6] [--out FILE]

Starts of Python with and without the hook take turns, each a process; so do runs of one small DeepSpeed loop
(rank 0 of one, on the CPU), which print the median of their own steps and the processor time of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rows import Row, RowLog
from benchmarks.session import RESULTS, run_main
from benchmarks.stats import Interval, bootstrap
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.script.hookenv import script_environment
from llmtop.trainer.script.unseen import unseen_prediction, unseen_spec
from llmtop.trainer.supervisor.rankenv import free_port

GOAL_START_MS = 20.0
GOAL_STEP_MS = 0.1
_LOOP = Path(__file__).with_name("script_loop.py")


def started(environment: dict[str, str]) -> float:
    """Wall seconds of a Python that does nothing."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
    return time.perf_counter() - began


def looped(environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """Median wall seconds of a step, and processor seconds of one, as the loop tells them."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ports = {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(_LOOP)],
        env={**environment, **ranks, **ports},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def _run_in(folder: Path) -> RunDir:
    """A run of its own: a second one's rank would not be watched."""
    return RunDir.create(folder, unseen_spec(("x",), folder, detect_machine()), unseen_prediction(), {})


def in_pairs(pairs: list[tuple[float, float]]) -> Interval:
    """Milliseconds that the second of each pair takes more."""
    return bootstrap([1e3 * (hooked - bare) for bare, hooked in pairs], statistics.median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS / "script_hook.jsonl")
    options = parser.parse_args()
    order = random.Random(0)
    bare = dict(os.environ)
    row: Row = {"python": sys.version.split()[0], "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="llmtop-hook-") as folder:
        starts: list[tuple[float, float]] = []
        steps: list[tuple[float, float]] = []
        cpu_steps: list[tuple[float, float]] = []
        for at in range(options.starts + options.rounds):
            hooked = script_environment(_run_in(Path(folder)), bare)
            turns = [bare, hooked]
            order.shuffle(turns)
            if at < options.starts:
                took = {id(each): started(each) for each in turns}
                starts.append((took[id(bare)], took[id(hooked)]))
                continue
            loops = {id(each): looped(each, Path(folder)) for each in turns}
            steps.append((loops[id(bare)][0], loops[id(hooked)][0]))
            cpu_steps.append((loops[id(bare)][1], loops[id(hooked)][1]))
    told = {
        "start": (starts, GOAL_START_MS),
        "step, wall": (steps, GOAL_STEP_MS),
        "step, processor": (cpu_steps, GOAL_STEP_MS),
    }
    for name, (pairs, goal) in told.items():
        if not pairs:
            continue
        more, of = in_pairs(pairs), statistics.median(alone for alone, _ in pairs)
        row[name] = {"added_milliseconds": [more.value, more.low, more.high], "bare_milliseconds": 1e3 * of}
        print(f"{name:<16} {more} ms more than {1e3 * of:.2f} ms (goal {goal:g})")
    row["pairs_seconds"] = {"start": starts, "step": steps, "step_cpu": cpu_steps}
    RowLog(options.out).add({"cell": {"hook": "sitecustomize"}, **row})


if __name__ == "__main__":
    run_main(main)
