"""A rank of a trial without torch: `python trial_rank.py RUNDIR`, as LLMTOP_WORKER_COMMAND starts it.

Its steps take what the micro-batch says, by the stamps of its events and not by the clock. With `HOLDS` in
its environment it stands after that step until the test puts a file `go` into the run's folder.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

HOLDS = "LLMTOP_TEST_TRIAL_HOLDS"
"""At which step it stands."""
BOUND_SECONDS = 600.0


def worker_command() -> str:
    """What LLMTOP_WORKER_COMMAND has to be."""
    return shlex.join([sys.executable, str(Path(__file__).resolve())])


def main(folder: str) -> None:
    from llmtop.profiler.record.eventlog import EventWriter
    from llmtop.profiler.record.events import RankFinished, StepFinished
    from llmtop.profiler.record.rundir import RunDir
    from llmtop.trainer.pdeath import die_with_parent

    die_with_parent()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda caught, _frame: asked.append(caught))
    run, rank = RunDir(Path(folder)), int(os.environ["RANK"])
    options = run.spec().options
    events = EventWriter(run.events_path(rank), f"rank{rank}")
    seconds = 1.0 / options.micro_batch
    for step in range(1, options.steps + 1):
        events.write(StepFinished(step=step, loss=1.0, step_seconds=seconds, ended=1000.0 + step * seconds))
        end = time.monotonic() + BOUND_SECONDS
        holds = os.environ.get(HOLDS) == str(step)
        while holds and not asked and not (run.path / "go").exists() and time.monotonic() < end:
            time.sleep(0.01)
        if asked:
            # As the worker: its last step is told when it is made, the others while the next is under way.
            events.write(StepFinished(step=step + 1, loss=1.0, ended=1000.0 + (step + 0.01) * seconds))
            break
    events.write(RankFinished(reason="stopped" if asked else "completed", last_step=step))
    events.close()


if __name__ == "__main__":
    main(sys.argv[1])
