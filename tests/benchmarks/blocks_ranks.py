"""A few blocks of each arm on a tiny model, in a process of its own; prints what they left behind."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

from benchmarks.blocks import Bench
from benchmarks.cells import plan
from llmtop.presets.resolve import Machine
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import MemoryClassified, StepFinished

STEPS = 5


def main(root: Path) -> None:
    cell = {"model": "tiny-llama-cpu", "gpus": 1, "seq_len": 32, "micro_batch": 1, "threads_per_rank": 1}
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
    bench = Bench(plan({**cell, "steps": 10**9, "lr_schedule": "constant"}, machine, name="blocks"), root)
    arms = {
        "bare": bench.bare(),
        "watched": bench.watched(classify_every=0),
        "classified": bench.watched(classify_every=STEPS),
    }
    tail = EventTail(bench.run_dir.events_path(0))
    bench.step_seconds(arms["bare"], STEPS)
    found = {}
    for name, arm in arms.items():
        # The first two steps of each probes are classified, whatever they were asked for.
        bench.step_seconds(arm, 2)
        tail.poll()
        seconds = bench.step_seconds(arm, STEPS)
        events = tail.poll()
        steady = [e.step for e in events if isinstance(e, MemoryClassified) and e.moment == "between_steps"]
        found[name] = {
            "wall": seconds.wall,
            "cpu": seconds.cpu,
            "steps": sum(isinstance(event, StepFinished) for event in events),
            "classified": steady,
            "kinds": Counter(type(event).__name__ for event in events),
        }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
