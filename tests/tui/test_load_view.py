"""What a model needs to be loaded: any context length by its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.tui.widgets.loadview import LoadView
from tests.recorded_spec import recorded_spec
from tests.tui.test_gpu_picker import Bench
from tests.tui.tuiruns import wait_for, wait_for_text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


async def test_a_context_is_typed(root: Path) -> None:
    bench = Bench(root)
    async with bench.app.run_test(size=(100, 40)) as pilot:
        await wait_for_text(pilot, "✓ fits")
        bench.app.push_screen(LoadView(recorded_spec("cuda")))
        await wait_for_text(pilot, "8,192 tokens kept for 1 request", "the largest that fits: bf16 on b200")
        await pilot.press("c")
        await wait_for_text(pilot, "Context length")
        await pilot.press(*"5000", "enter")
        await wait_for_text(pilot, "5,000 tokens kept for 1 request")
        await pilot.press("c", "escape")
        await wait_for(pilot, lambda: isinstance(bench.app.screen, LoadView))
        await wait_for_text(pilot, "5,000 tokens kept for 1 request")
