"""How long a run stands still while it goes over to another setting.

    python -m benchmarks.restage [--cell '{"model": "llama-3.1-8b", "gpus": 2}'] [--to zero=3 --to zero=2]
    python -m benchmarks.restage --gpus 8 --to "gpus=4 micro_batch=2" --to "gpus=8 micro_batch=1"

A supervised run is changed by each `--to` in turn, a few steps after the change before it. A row has the
seconds from the end of the last step on the old setting to the end of the first on the new one, what they
went into, and whether the loss went on. A run that stands still for longer than `--patience` is asked where
before it is ended.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.cells import plan
from benchmarks.liverun import live_run, wait_for_steps
from benchmarks.rows import Cell, Row
from benchmarks.session import RESULTS, run_main
from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control

GOAL_SECONDS = 60.0
"""For Llama-3.1-8B on two H200."""
STEPS_BETWEEN = 3
_PATIENCE_SECONDS = 400.0
_GPU: Cell = {
    "model": "llama-3.1-8b",
    "zero": 2,
    "micro_batch": 1,
    "seq_len": 2048,
    "attention": "flash_attention_2",
    "liger": True,
    "gradient_checkpointing": True,
}
_CPU: Cell = {"model": "tiny-llama-cpu", "gpus": 2, "zero": 1, "seq_len": 64, "threads_per_rank": 1}
_TO = ("zero=3", "zero=2 attention=sdpa", "micro_batch=2 grad_accum=1")


def measure(run: RunDir, words: tuple[str, ...], cell: Cell, patience_seconds: float) -> Row:
    """One change, from the request to some steps after it."""
    wait_for_steps(run, STEPS_BETWEEN, patience_seconds)
    request = control.change(run, control.SetParams(words=words))
    answer = control.wait_until_settled(run, request, patience_seconds)
    wait_for_steps(run, STEPS_BETWEEN, patience_seconds)
    record = read_state(run).changes.records[-1]
    steps = [event for event in EventTail(run.events_path(0)).poll() if isinstance(event, StepFinished)]
    restaged = record.restaged
    return {
        "cell": cell,
        "to": " ".join(words),
        "status": record.status,
        "reason": record.reason or (answer.reason if answer is not None else "no answer"),
        "down_seconds": record.down_seconds,
        "stage_seconds": restaged.stage_seconds if restaged else {},
        "first_step": record.step,
        "losses": [[event.step, event.loss] for event in steps[-3 * STEPS_BETWEEN :]],
    }


def told(row: Row) -> str:
    """One line for a person."""
    down = row["down_seconds"]
    seconds = "n/a" if down is None else f"{down:.1f} s"
    parts = ", ".join(f"{name} {took:.1f}" for name, took in row["stage_seconds"].items())
    return f"{row['to']:<30}{row['status']:<10}down {seconds}  {parts or row['reason']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cell", type=json.loads, default={}, help="run options as JSON, over the default's")
    parser.add_argument("--gpus", type=int, help="to begin with; default: all there are, 2 ranks on the CPU")
    parser.add_argument("--to", action="append", help="key=value words of one change; may be repeated")
    parser.add_argument("--cpu", action="store_true", help="on the CPU kind, whatever devices there are")
    parser.add_argument("--patience", type=float, default=_PATIENCE_SECONDS, help="seconds for each wait")
    parser.add_argument("--out", type=Path, default=RESULTS / "restage.jsonl")
    options = parser.parse_args()
    machine = detect_machine()
    if options.cpu:
        machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=machine.host_memory_bytes)
    default = _CPU if machine.gpu == "cpu" else {**_GPU, "gpus": machine.gpus}
    gpus = {} if options.gpus is None else {"gpus": options.gpus}
    cell = {**default, **options.cell, **gpus}
    planned = plan({**cell, "steps": 10**6, "lr_schedule": "constant"}, machine, name="restage")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with live_run(planned, "restage", options.patience) as run:
        for words in options.to or _TO:
            row = {"device": machine.gpu, **measure(run, tuple(words.split()), cell, options.patience)}
            with options.out.open("a") as log:
                log.write(json.dumps(row) + "\n")
            print(told(row), flush=True)
    print(f"goal: at most {GOAL_SECONDS:.0f} s for Llama-3.1-8B on two H200")


if __name__ == "__main__":
    run_main(main)
