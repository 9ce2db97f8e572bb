"""Steps of the warm-up tell no speed, in the panel as in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.profiler.record.stepevents import BETWEEN
from llmtop.tui.app import LlmtopApp
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import LiveRun, wait_for_text


async def test_a_run_of_one_step_has_no_speed(root: Path) -> None:
    run = make_recorded_run(root, steps=1)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(120, 50)) as pilot:
        shown = await wait_for_text(pilot, "a step so far", "n/a after the first 2")
        assert "tok/s" not in shown


async def test_a_run_that_goes_on_has_no_speed_of_its_processes_before(root: Path) -> None:
    live = LiveRun(root, steps=20)
    live.start()
    live.steps(1, 6)
    live.end("stopped", "asked")
    live.go_on(after=6)
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(120, 50)) as pilot:
        await wait_for_text(pilot, "Start-up")
        await pilot.press("4")
        shown = await wait_for_text(pilot, "no step has finished since it went on")
        assert "tok/s" not in shown
        live.steps(7, 9)
        await wait_for_text(pilot, "tok/s")
    live.close()


async def test_what_a_script_does_between_its_steps_has_a_column(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"data": 0.1, BETWEEN: 0.3, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    monkeypatch.setattr("tests.recorded._PHASE_SHARE", shares)
    run = make_recorded_run(root, steps=6)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(120, 50)) as pilot:
        await wait_for_text(pilot, "data 10% between 30% fwd 20%")
        await pilot.press("4")
        shown = await wait_for_text(pilot, "E between", "(data, between, forward)")
        head, first = (row.split() for row in shown.splitlines() if row.split()[:1] in (["rank"], ["0"]))
        assert head == ["rank", "data", "between", "fwd", "bwd", "opt"]
        assert first[3:5] == first[7:9]  # between and backward: a figure and its unit each
        assert first[11:] == ["D", "E", "F", "B", "O"]  # in the bar
