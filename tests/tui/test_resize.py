"""Any size at any time: screens reflow, nothing is drawn beyond the edge, and nothing fails."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot

from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.requests import ReplayWish
from llmtop.tui.screens.monitor import MonitorScreen, all_panels
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import MACHINE, screen_text, wait_for

EDGES = ((20, 5), (250, 80), (20, 80), (250, 5))

WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "runs": ("runs", ()),
    "runs, filtering": ("runs", ("slash", "c")),
    "runs, help": ("runs", ("question_mark",)),
    "runs, palette": ("runs", ("ctrl+p",)),
    "runs, comparing": ("runs", ("space", "j", "c")),
    "plan": ("plan", ()),
    "plan, editing": ("plan", ("down", "enter")),
    "monitor": ("monitor", ()),
    "replay": ("replay", ()),
    "replay, asking": ("replay", ("t",)),
}


def sizes(seed: str, count: int) -> list[tuple[int, int]]:
    drawn = random.Random(seed)
    return [(drawn.randint(20, 250), drawn.randint(5, 80)) for _ in range(count)]


async def resize(pilot: Pilot[Any], width: int, height: int) -> None:
    """Until the screen is drawn for that size; nothing lies beyond its edge."""

    def is_drawn() -> bool:
        rows = screen_text(pilot.app).split("\n")
        fits = len(rows) <= height and max(map(cell_len, rows)) <= width
        return pilot.app.size == (width, height) and fits and any(row.strip() for row in rows)

    await pilot.resize_terminal(width, height)
    await wait_for(pilot, is_drawn, f"{width}x{height}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resized")
    make_recorded_run(root, steps=6)
    make_recorded_run(root, kind="cuda", ranks=8, steps=12, end="completed")
    return root


def app_on(folder: Path, start: str) -> LlmtopApp:
    return LlmtopApp(
        start,  # type: ignore[arg-type]
        RunDir.open(max(folder.iterdir())),
        folder,
        deeds=Deeds(detect=lambda: MACHINE),
        wish=ReplayWish(step=5),
    )


@pytest.mark.parametrize("way", WAYS)
async def test_any_size_at_any_time(way: str, folder: Path) -> None:
    start, keys = WAYS[way]
    app = app_on(folder, start)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for(pilot, lambda: app.settled and bool(getattr(app.screen, "rows", True)))
        await pilot.press(*keys)
        for width, height in (*EDGES, *sizes(way, 3)):
            await resize(pilot, width, height)


async def test_every_opened_panel_at_any_size(folder: Path) -> None:
    app = app_on(folder, "monitor")
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for(pilot, lambda: app.settled)
        for name, _ in all_panels():
            assert isinstance(app.screen, MonitorScreen)
            await app.screen.action_open(name)
            for width, height in ((20, 5), *sizes(name, 1)):
                await resize(pilot, width, height)
