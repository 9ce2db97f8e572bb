"""Both sides' entries with a clock of the processor time that their steps take, for runs on a CPU.

On a machine with other work it tells what wall time cannot.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.window import first_and_last
from llmtop.profiler.record.rundir import RunDir

_FILE = "processor.json"


def worker(arguments: list[str]) -> None:
    """Our worker."""
    from llmtop.trainer.worker.__main__ import main

    _watch(RunDir.open(Path(arguments[0])))
    main(arguments)


def trainer(arguments: list[str]) -> None:
    """Hugging Face's Trainer."""
    from benchmarks.hf_trainer import main

    _watch(RunDir.open(Path(arguments[0])))
    main(arguments)


def processor_seconds(run: RunDir) -> float | None:
    """Of all threads of rank 0 for one step; None when the run did not get through its window."""
    file = run.path / _FILE
    return json.loads(file.read_text())["seconds_per_step"] if file.exists() else None


def _watch(run: RunDir) -> None:
    """In rank 0: from the end of the window's first step to that of its last."""
    spec = run.spec()
    if not spec.on_cpu or os.environ.get("RANK", "0") != "0":
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    plain: Callable[..., Any] = DeepSpeedEngine.step
    first, last = first_and_last(spec.options.steps)
    began = 0.0
    steps = 0

    def step(engine: Any, *given: Any, **named: Any) -> Any:
        nonlocal began, steps
        is_last = engine.is_gradient_accumulation_boundary()
        answer = plain(engine, *given, **named)
        steps += is_last
        if is_last and steps == first:
            began = time.process_time()
        if is_last and steps == last:
            seconds = (time.process_time() - began) / (last - first)
            (run.path / _FILE).write_text(json.dumps({"seconds_per_step": seconds}))
        return answer

    DeepSpeedEngine.step = step
