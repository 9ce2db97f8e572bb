"""What the supervisor of a script keeps of what its ranks tell."""

from __future__ import annotations

from pathlib import Path

from llmtop.presets.resolve import Machine
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import RankAttached
from llmtop.trainer.script.follow import ScriptProgress
from llmtop.trainer.script.unseen import unseen_prediction, unseen_spec


def step(number: int, seconds: float, *, profiled: bool = False) -> StepFinished:
    return StepFinished(
        step=number,
        loss=1.0,
        tokens=1,
        micro_batch=1,
        step_seconds=seconds,
        phase_seconds={},
        phase_memory={},
        profiled=profiled,
    )


def test_steps_that_were_looked_at_are_not_of_the_usual_pace(tmp_path: Path) -> None:
    """Else a trace of some steps makes the watch over hangs more patient than the run is."""
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
    run = RunDir.create(tmp_path, unseen_spec(("train.py",), tmp_path, machine), unseen_prediction(), {})
    with EventWriter(run.events_path(0), "rank0") as events:
        events.write(RankAttached(pid=1, world_size=4, framework="torch"))
        for number, seconds in enumerate((1.0, 60.0, 60.0), start=1):
            events.write(step(number, seconds, profiled=seconds > 1))
    progress = ScriptProgress(run)
    progress.poll()
    assert (progress.median_step_seconds, progress.last_step, progress.world_size) == (1.0, 3, 4)
    assert progress.least_step_seconds == 1.0
