"""The folder of a run that goes on is removed: nothing is left behind that nobody could find again."""

from __future__ import annotations

import shutil

import psutil
import pytest

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.events import RankStarted
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.replay import Replay
from llmtop.trainer import control
from tests.faults.conftest import Start
from tests.trainer.supervised import TIMEOUT_SECONDS


def test_the_run_ends_and_whoever_looks_is_told(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(2)
    reader, replay = RunReader(run.run), Replay(run.run, lambda _: {})
    before = reader.poll()
    replay.read_on(0.0)
    processes = [psutil.Process(pid) for pid in (run.supervisor_pid, *(e.pid for e in run.of(RankStarted)))]
    shutil.rmtree(run.run.path)
    assert not psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)[1]
    after = reader.poll()
    assert after.status == "lost" and after.steps_finished == before.steps_finished
    replay.read_on(1.0)
    with pytest.raises(LlmtopError, match="is not a run|takes no requests"):
        control.stop(RunDir.open(run.run.path), save=False)
    assert not run.run.path.exists(), "nobody makes it again"
