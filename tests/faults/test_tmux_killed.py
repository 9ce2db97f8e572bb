"""The whole tmux server in which a run was started is killed: the run goes on."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.trainer import control
from tests.e2e.conftest import LLMTOP, environment
from tests.trainer.supervised import GRACES, worker_command

LIMIT_SECONDS = 180.0

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


def test_the_run_goes_on_and_stops_when_asked(tmp_path: Path) -> None:
    env = {
        **{name: value for name, value in environment(tmp_path).items() if name not in ("TMUX", "TMUX_PANE")},
        "LLMTOP_WORKER_COMMAND": worker_command("trains"),
        "LLMTOP_GRACES": GRACES,
    }
    words = ["tmux", "-f", "/dev/null", "-S", str(tmp_path / "tmux")]
    begin = ["new-session", "-d", "-s", "x", "-x", "80", "-y", "24", LLMTOP, "run", "cpu-demo"]
    subprocess.run([*words, *begin], env=env, check=True, timeout=LIMIT_SECONDS)
    run: RunDir | None = None
    try:
        run = _first_run(tmp_path / "runs")
        _until_steps(run, 3)
        subprocess.run([*words, "kill-server"], env=env, check=True, timeout=LIMIT_SECONDS)
        _until_steps(run, read_state(run).steps_finished + 5)
        assert run.supervisor_alive()
    finally:
        subprocess.run([*words, "kill-server"], env=env, check=False, capture_output=True, timeout=60)
        if run is not None and run.supervisor_alive():
            control.stop(run, save=False)
    end = control.wait_for_end(run, LIMIT_SECONDS)
    assert end is not None and end.state == "stopped"


def _first_run(root: Path) -> RunDir:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (runs := list_runs(root)):
        assert time.monotonic() < deadline, "no run appeared"
        time.sleep(0.05)
    return runs[0]


def _until_steps(run: RunDir, steps: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while read_state(run).steps_finished < steps:
        assert time.monotonic() < deadline, read_state(run)
        time.sleep(0.05)
