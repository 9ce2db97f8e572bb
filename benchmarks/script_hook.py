"""What watching costs a training script of the user's own: Python's start, and a step.

    python -m benchmarks.script_hook [--starts 40] [--rounds 6] [--blocks 12] [--out FILE]

Starts of Python with and without the hook take turns, each a process; so do runs of one small DeepSpeed loop
(rank 0 of one, on the CPU), which print the median of their own steps and the processor time of a step. Pairs
cannot tell a tenth of a millisecond on a machine with other work; so one more run tells, in blocks of steps,
the processor time that its thread spent inside the hook's own calls.
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
from typing import Any

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
WRITER = "writer's thread"
"""As the loop calls it."""
_LOOP = Path(__file__).with_name("script_loop.py")


def started(environment: dict[str, str]) -> float:
    """Wall seconds of a Python that does nothing."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
    return time.perf_counter() - began


def looped(environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """Median wall seconds of a step, and processor seconds of one, as the loop tells them."""
    wall, cpu = _told(environment, folder)
    return wall, cpu


def inside(environment: dict[str, str], folder: Path, blocks: int) -> list[dict[str, float]]:
    """Processor seconds of a step in each of the hook's calls, of each block."""
    found: list[dict[str, float]] = _told(environment, folder, str(blocks))
    return found


def _told(environment: dict[str, str], folder: Path, *words: str) -> Any:
    """The last line of the loop."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ports = {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(_LOOP), *words],
        env={**environment, **ranks, **ports},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _run_in(folder: Path) -> RunDir:
    """A run of its own: a second one's rank would not be watched."""
    return RunDir.create(folder, unseen_spec(("x",), folder, detect_machine()), unseen_prediction(), {})


def in_pairs(pairs: list[tuple[float, float]]) -> Interval:
    """Milliseconds that the second of each pair takes more."""
    return bootstrap([1e3 * (hooked - bare) for bare, hooked in pairs], statistics.median)


def _inside(found: list[dict[str, float]]) -> dict[str, list[float]]:
    """Block by block: what the training waits for, and what is done beside it."""
    parts = list(found[0])
    calls = [name for name in parts if name != WRITER]
    return {
        "the hook's calls": [sum(block[name] for name in calls) for block in found],
        **{name: [block[name] for block in found] for name in parts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=12, help="inside the hook's calls")
    parser.add_argument("--out", type=Path, default=RESULTS / "script_hook.jsonl")
    options = parser.parse_args()
    order = random.Random(0)
    bare = dict(os.environ)
    scheduled = os.sched_getscheduler(0) != os.SCHED_OTHER
    row: Row = {"python": sys.version.split()[0], "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    row["before_other_work"] = scheduled
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
        if options.blocks:
            hooked = script_environment(_run_in(Path(folder)), bare)
            clock = inside(bare, Path(folder), options.blocks)
            found = inside(hooked, Path(folder), options.blocks)
            row["inside_seconds"], row["clock_seconds"] = found, clock
            own = {name: statistics.fmean(block[name] for block in clock) for name in clock[0]}
            found = [{name: spent - own[name] for name, spent in block.items()} for block in found]
            for name, seconds in _inside(found).items():
                more = bootstrap([1e3 * each for each in seconds], statistics.fmean)
                row[f"inside, {name}"] = {"milliseconds": [more.value, more.low, more.high]}
                print(f"inside, {name:<24} {more} ms a step (goal {GOAL_STEP_MS:g})")
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
