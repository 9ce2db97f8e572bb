"""Many viewers of one run: each sees the same, none of them costs the training anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.profiler.record.feed import RunReader
from llmtop.trainer import control
from tests.e2e.conftest import LLMTOP, environment
from tests.e2e.terminal import Terminal
from tests.faults.conftest import Start

VIEWERS = 20


def test_twenty_readers_see_the_same_and_write_nothing(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    readers = [RunReader(run.run) for _ in range(VIEWERS)]
    for step in (5, 10, 15):
        run.wait_for_step(step)
        assert all(reader.poll().steps_finished >= step for reader in readers)
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"
    # Nobody else writes by now.
    written = {path: path.stat().st_mtime_ns for path in run.run.path.rglob("*")}
    states = [reader.poll() for reader in readers]
    assert all(state == states[0] for state in states)
    assert written == {path: path.stat().st_mtime_ns for path in run.run.path.rglob("*")}


@pytest.mark.slow
def test_twenty_monitors_open_on_one_run_and_the_training_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("trains")
    run.wait_for_step(1)
    terminals = [Terminal([LLMTOP, "attach", run.run.run_id], environment(tmp_path)) for _ in range(VIEWERS)]
    try:
        for terminal in terminals:
            terminal.wait_for("Help")
        control.stop(run.run, save=False)
        assert run.end().state == "stopped"
        for terminal in terminals:
            terminal.wait_for("STOPPED")
            terminal.type("q")
        for terminal in terminals:
            assert terminal.process.wait(120) == 0
    finally:
        for terminal in terminals:
            terminal.__exit__()
