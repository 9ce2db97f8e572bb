"""The key that shows where each rank stands."""

from __future__ import annotations

from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from tests.tui.tuiruns import LiveRun, wait_for_text


async def test_stacks_are_taken_when_their_panel_is_opened(live: LiveRun, root: Path) -> None:
    asked: list[int] = []

    def stacks(run: RunDir, state: RunState) -> str:
        asked.append(state.world_size)
        if len(asked) > 1:
            raise LlmtopError("cannot look", why="the machine does not let it")
        return "=== rank 0, process 4242, by py-spy\n\x1b[31m    all_reduce (torch.py:9)"

    app = LlmtopApp("monitor", live.run, root, deeds=Deeds(stacks=stacks))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("t")
        shown = await wait_for_text(pilot, "t Stacks", "=== rank 0, process 4242", "all_reduce (torch.py:9)")
        assert "\x1b" not in shown
        await pilot.press("t")
        await wait_for_text(pilot, "1 Memory", "8 Log")
        await pilot.press("t")
        await wait_for_text(pilot, "cannot look")
    assert asked == [2, 2]
