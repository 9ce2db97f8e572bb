"""A rank without torch that tells as many steps in minutes as one that trains for days; a worker command."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.ui_runs import step_event
from llmtop.profiler.record.events import RankFinished
from llmtop.profiler.record.patientlog import PatientWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.pdeath import die_with_parent

_PAUSE_SECONDS = 0.0005


def main() -> None:
    die_with_parent()
    run, rank = RunDir.open(Path(sys.argv[1])), int(os.environ["RANK"])
    steps = run.spec().options.steps
    with PatientWriter(run.events_path(rank), f"rank{rank}") as events:
        for step in range(1, steps + 1):
            events.write(step_event(step, rank, time.time(), 0.01))
            time.sleep(_PAUSE_SECONDS)
        events.write(RankFinished(reason="completed", last_step=steps))


if __name__ == "__main__":
    main()
