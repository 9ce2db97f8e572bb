"""The folder of a run that goes on is removed: nothing is left behind that nobody could find again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

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


def remove_at_once(folder: Path) -> None:
    """With all that its processes may put into it while it is taken apart."""
    away = folder.rename(folder.with_name("away"))
    shutil.rmtree(away)


def test_the_run_ends_and_whoever_looks_is_told(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(2)
    reader, replay = RunReader(run.run), Replay(run.run, lambda _: {})
    before = reader.poll()
    replay.read_on(0.0)
    processes = [psutil.Process(pid) for pid in (run.supervisor_pid, *(e.pid for e in run.of(RankStarted)))]
    remove_at_once(run.run.path)
    assert not psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)[1]
    after = reader.poll()
    assert after.status == "lost" and after.steps_finished == before.steps_finished
    replay.read_on(1.0)
    with pytest.raises(LlmtopError, match="is not a run|takes no requests"):
        control.stop(RunDir.open(run.run.path), save=False)
    assert not run.run.path.exists(), "nobody makes it again"


def without_its_pid(run: RunDir) -> None:
    run.supervisor_pid_path.unlink()


def with_another_pid(run: RunDir) -> None:
    run.supervisor_pid_path.write_text("{")


def without_requests(run: RunDir) -> None:
    shutil.rmtree(run.control_dir)


@pytest.mark.parametrize("harm", [without_its_pid, with_another_pid, without_requests])
def test_what_a_live_run_is_reached_by_is_put_back(start: Start, harm: Callable[[RunDir], None]) -> None:
    run = start("trains")
    run.wait_for_step(2)
    pid = run.supervisor_pid
    harm(run.run)
    end = time.monotonic() + TIMEOUT_SECONDS
    while not (run.run.supervisor_alive() and run.run.control_dir.is_dir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert run.supervisor_pid == pid
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"
