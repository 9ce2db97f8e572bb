"""Steps of the warm-up tell no speed, in the panel as in the report."""

from __future__ import annotations

from pathlib import Path

from llmtop.tui.app import LlmtopApp
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import wait_for_text


async def test_a_run_of_one_step_has_no_speed(root: Path) -> None:
    run = make_recorded_run(root, steps=1)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(120, 50)) as pilot:
        shown = await wait_for_text(pilot, "a step, warming up", "n/a after warm-up")
        assert "tok/s" not in shown
