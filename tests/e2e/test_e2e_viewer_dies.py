"""The viewer never owns the job: terminal and app die, the training goes on, and somebody comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir, list_runs
from tests.e2e.conftest import LIMIT_SECONDS, LLMTOP, environment
from tests.e2e.terminal import Terminal

pytestmark = pytest.mark.slow

STEPS = "100000"
"""Far more than the test waits for: only a death ends the run."""


class Going(NamedTuple):
    """A run that goes on, and the reader that tells how far it is."""

    run: RunDir
    reader: RunReader
    env: Mapping[str, str]

    def until(self, holds: Callable[[RunState], bool], what: str) -> RunState:
        """Poll until `holds`; the run's files are all there is to ask, as for any viewer."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            state = self.reader.poll()
            if holds(state):
                return state
            assert state.ended is None, f"waiting for {what}: {state.ended}"
            time.sleep(0.1)
        raise AssertionError(f"never: {what}")

    def until_steps_go_on(self) -> None:
        before = self.reader.poll().steps_finished
        self.until(lambda state: state.steps_finished >= before + 3, "three more steps")


@pytest.fixture(scope="module")
def orphan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Going]:
    """A run started from a terminal that is torn away, with its app, while it trains."""
    folder = tmp_path_factory.mktemp("orphan")
    env = environment(folder)
    with Terminal([LLMTOP, "run", "cpu-demo", "--steps", STEPS], env) as terminal:
        terminal.wait_for("cpu-demo")
        run = _first_run(folder / "runs", terminal)
        going = Going(run, RunReader(run), env)
        going.until(lambda state: state.steps_finished >= 2, "the second step")
        assert terminal.process.poll() is None, "the monitor is still open"
        terminal.close()
        if terminal.process.poll() is None:
            terminal.process.send_signal(signal.SIGKILL)
        terminal.process.wait(LIMIT_SECONDS)
    yield going
    identity = run.supervisor_identity()
    if identity is not None and process_identity(identity.pid) == identity:
        os.kill(identity.pid, signal.SIGKILL)


def _first_run(root: Path, terminal: Terminal) -> RunDir:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and terminal.process.poll() is None:
        runs = list_runs(root)
        if runs:
            return runs[0]
        time.sleep(0.1)
    raise AssertionError("no run appeared")


def test_the_training_goes_on_without_terminal_and_app(orphan: Going) -> None:
    orphan.until_steps_go_on()
    assert orphan.run.supervisor_alive()


def test_attach_comes_back_and_its_death_changes_nothing(orphan: Going) -> None:
    with Terminal([LLMTOP, "attach", "latest"], orphan.env) as terminal:
        terminal.wait_for("cpu-demo")
        orphan.until_steps_go_on()
        terminal.process.send_signal(signal.SIGKILL)
        terminal.process.wait(LIMIT_SECONDS)
    orphan.until_steps_go_on()


def test_a_killed_rank_fails_the_run_and_leaves_nobody(orphan: Going) -> None:
    """Last in this file: it ends the run that the others look at."""
    state = orphan.reader.poll()
    pids = [rank.pid for rank in state.ranks.values()]
    assert len(pids) == 2 and all(pid is not None for pid in pids)
    family = [
        process
        for pid in [state.supervisor_pid, *pids]
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    ]
    victim = state.ranks[1].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    ended = orphan.until(lambda state: state.ended is not None, "the end").ended
    assert ended is not None
    assert ended.state == "failed"
    assert "rank 1" in ended.reason and "SIGKILL" in ended.reason
    _, alive = psutil.wait_procs(family, timeout=LIMIT_SECONDS)
    assert alive == []
    after = subprocess.run(
        [LLMTOP, "attach", "latest", "--headless"],
        env=orphan.env,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert after.returncode == 4
    assert "rank 1" in after.stderr and "SIGKILL" in after.stderr
