"""How long a closer look at a live run takes, and how long it holds up the training.

    python -m benchmarks.snapshots [--cell '{"model": "llama-3.2-1b"}'] [--what state --what trace]

A supervised run is asked for one snapshot after the other, as a key of the monitor asks. A row has the
seconds from the request to the rank's answer (the wait for a step between included), those that the rank
stood still for it, the longest step beside the usual one, and the bytes written. At last the run is stopped,
and a row says after how many seconds its ranks were gone and its device's memory was free again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import msgspec

from benchmarks.cells import plan
from benchmarks.liverun import live_run, wait_for_steps
from benchmarks.rows import Cell, Row
from benchmarks.session import RESULTS, run_main
from llmtop.presets.errors import JobFailedError
from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotParams, SnapshotTaken
from llmtop.trainer import control

GOAL_SECONDS, GOAL_STALL_SECONDS = 5.0, 1.0
"""Of `state` without stacks, for a model of 8B."""
_STEPS_BETWEEN = 3
_GPU: Cell = {
    "model": "llama-3.1-8b",
    "gpus": 1,
    "zero": 3,
    "micro_batch": 1,
    "seq_len": 2048,
    "optimizer": "adamw_8bit",
    "attention": "flash_attention_2",
    "liger": True,
    "gradient_checkpointing": True,
}
_CPU: Cell = {"model": "tiny-llama-cpu", "gpus": 2, "zero": 1, "seq_len": 64, "threads_per_rank": 1}
_ASKED = {
    "state": SnapshotParams(what="state"),
    "modules": SnapshotParams(what="modules"),
    "trace": SnapshotParams(what="trace", steps=2),
    "state with stacks": SnapshotParams(what="state", with_stacks=True),
}


def measure(run: RunDir, asked: SnapshotParams, patience_seconds: float) -> Row:
    """One snapshot of rank 0, from the request to some steps after it."""
    wait_for_steps(run, _STEPS_BETWEEN, patience_seconds)
    log = EventTail(run.events_path(0))
    usual = [event.step_seconds for event in log.poll() if isinstance(event, StepFinished)]
    began = time.monotonic()
    request = control.snapshot(run, asked)
    taken, steps = None, []
    while taken is None:
        for event in log.poll():
            taken = event if isinstance(event, SnapshotTaken) else taken
            steps += [event.step_seconds] if isinstance(event, StepFinished) else []
        if refused := [one for one in control.answers(run).get(request, ()) if one.answer == "refused"]:
            raise JobFailedError(f"the snapshot was refused: {refused[-1].reason}", why=_end_of(run))
        if time.monotonic() - began > patience_seconds or not run.supervisor_alive():
            raise JobFailedError("nothing came of the snapshot", why=_end_of(run))
        time.sleep(0.01)
    answered = time.monotonic() - began
    wait_for_steps(run, 1, patience_seconds)
    steps += [event.step_seconds for event in log.poll() if isinstance(event, StepFinished)]
    return {
        "problem": taken.problem,
        "answered_seconds": answered,
        "seconds": taken.seconds,
        "stall_seconds": taken.stall_seconds,
        "usual_step_seconds": statistics.median(usual[-2 * _STEPS_BETWEEN :]),
        "longest_step_seconds": max(steps),
        "size_bytes": sum(file.size_bytes for file in taken.files),
    }


def _end_of(run: RunDir) -> str:
    state = read_state(run)
    log = run.log_path(0).read_text(errors="replace")[-1500:]
    return f"{state.status}, {state.ended.reason if state.ended else 'not ended'}; its log ends:\n{log}"


def stopped(run: RunDir, patience_seconds: float) -> Row:
    """What is known of the end: when the ranks were gone, and their device's memory was free."""
    began = time.monotonic()
    control.stop(run, save=False)
    end = control.wait_for_end(run, patience_seconds)
    took = time.monotonic() - began
    returned = read_state(run).memory_returned
    return {
        "what": "stop",
        "state": end.state if end else None,
        "ended_seconds": took,
        "memory_returned": msgspec.to_builtins(returned),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cell", type=json.loads, default={}, help="run options as JSON, over the default's")
    parser.add_argument("--what", action="append", choices=_ASKED, help="may be repeated; default: all")
    parser.add_argument("--cpu", action="store_true", help="on the CPU kind, whatever devices there are")
    parser.add_argument("--patience", type=float, default=200.0, help="seconds for each wait")
    parser.add_argument("--out", type=Path, default=RESULTS / "snapshots.jsonl")
    options = parser.parse_args()
    machine = detect_machine()
    if options.cpu:
        machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=machine.host_memory_bytes)
    on_cpu = machine.gpu == "cpu"
    cell = {**(_CPU if on_cpu else _GPU), **options.cell}
    planned = plan({**cell, "steps": 10**6, "lr_schedule": "constant"}, machine, name="snapshots")
    # The CPU kind has no allocator to look into.
    names = options.what or [name for name in _ASKED if not (on_cpu and name.startswith("state"))]
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(row: Row) -> None:
        with options.out.open("a") as log:
            log.write(json.dumps({"device": machine.gpu, "cell": cell, **row}) + "\n")
        print(json.dumps(row), flush=True)

    with live_run(planned, "snapshots", options.patience) as run:
        for name in names:
            keep({"what": name, **measure(run, _ASKED[name], options.patience)})
        keep(stopped(run, options.patience))
    print(f"goal for 8B: state within {GOAL_SECONDS:.0f} s, training stalls under {GOAL_STALL_SECONDS:.0f} s")


if __name__ == "__main__":
    run_main(main)
