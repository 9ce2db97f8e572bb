"""The key that takes a closer look at a live run."""

from __future__ import annotations

from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotParams
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text


async def test_it_says_what_each_look_costs_and_shows_its_table(live: LiveRun, root: Path) -> None:
    asked: list[SnapshotParams] = []

    def snapshot(run: RunDir, params: SnapshotParams) -> str:
        asked.append(params)
        if len(asked) > 1:
            raise LlmtopError("no snapshot was taken", why="another is under way")
        return "Trace of rank 0\n\x1b[31m  compute 80%"

    app = LlmtopApp("monitor", live.run, root, deeds=Deeds(snapshot=snapshot))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("z")
        shown = await wait_for_text(pilot, "Take a closer look?", "trace of 2 steps: about", "modules: about")
        assert "stands still" in shown
        await pilot.press("t")
        shown = await wait_for_text(pilot, "Trace of rank 0", "compute 80%")
        assert "\x1b" not in shown
        await pilot.press("escape")
        await wait_for(pilot, lambda: "compute 80%" not in screen_text(app))
        await pilot.press("z")
        await wait_for_text(pilot, "modules: about")
        await pilot.press("m")
        await wait_for_text(pilot, "another is under way")
    assert [(params.what, params.steps) for params in asked] == [("trace", 2), ("modules", 1)]


async def test_a_run_that_has_ended_is_not_asked(live: LiveRun, root: Path) -> None:
    live.end("completed", "all 2 ranks finished step 60")
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "COMPLETED")
        assert not app.screen.check_action("snapshot", ())
