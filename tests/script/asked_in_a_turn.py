"""A supervisor's process (`RUNDIR`) that is asked something about a step which it has not looked at yet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import RankAttached
from llmtop.profiler.record.snapshotevents import SnapshotParams
from llmtop.trainer import control
from llmtop.trainer.script.job import Launched
from llmtop.trainer.script.supervisor import ScriptSupervisor
from llmtop.trainer.supervisor.ranks import RankExit


class Steps(Launched):
    """A command whose only rank steps in the middle of a turn, where somebody sees it and asks."""

    def __init__(self, run: RunDir) -> None:
        self._run_dir = run
        self._writer = EventWriter(run.events_path(0), "rank0")
        self._turned = self._asked = False
        script = run.spec().script
        assert script is not None
        super().__init__(run, script, os.environ)

    def reap(self) -> list[RankExit]:
        self._turned = True
        return super().reap()

    @property
    def alive(self) -> dict[int, int]:
        """Without ranks it is asked in each turn after the look at them and before that for requests."""
        if self._turned and not self._asked:
            self._asked = True
            self._step_and_ask()
        return super().alive

    def _step_and_ask(self) -> None:
        self._writer.write(RankAttached(pid=os.getpid(), world_size=1, framework="torch"))
        made = StepFinished(
            step=1, loss=1.0, tokens=1, micro_batch=1, step_seconds=0.1, phase_seconds={}, phase_memory={}
        )
        self._writer.write(made)
        self._writer.flush()
        control.snapshot(self._run_dir, SnapshotParams(what="modules"))
        control.stop(self._run_dir, save=False)


if __name__ == "__main__":
    its_run = RunDir.open(Path(sys.argv[1]))
    ScriptSupervisor(its_run, print, job=Steps(its_run)).run()
