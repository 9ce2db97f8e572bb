"""The monitor of a run on eight GPUs as it looks, in three sizes: every device has its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tui.eightgpus import GPUS, HOT, run_on_eight
from tests.tui.pictures import picture
from tests.tui.test_pictures import VIEWS, Album, Page, View, app_of, made_up, panels  # noqa: F401
from tests.tui.tuiruns import wait_for_text

three_sizes = pytest.mark.parametrize("view", VIEWS[:3], ids=lambda view: view.name)


@three_sizes
async def test_the_monitor_of_eight_gpus_and_the_panels_that_name_them(view: View, root: Path) -> None:
    album = Album(view)
    app = app_of(view, root, "monitor", run_on_eight(root))
    async with app.run_test(size=(view.columns, view.rows)) as pilot:
        pages = [Page("eight-monitor", (), ("COMPLETED", "1 Memory"))]
        for page in panels(
            ("memory", "1", "top 140 GiB"),
            ("steps", "4", "by rank"),
            ("links", "6", "phase"),
            ("devices", "9", "since the run began"),
        ):
            pages.append(page._replace(name=f"eight-{page.name}"))
        await album.take(pilot, pages)
    album.close()


@three_sizes
async def test_every_gpu_stands_in_the_first_rows_of_their_screen(view: View, root: Path) -> None:
    app = app_of(view, root, "monitor", run_on_eight(root))
    async with app.run_test(size=(view.columns, view.rows)) as pilot:
        await wait_for_text(pilot, "COMPLETED", "1 Memory")
        await pilot.press("9")
        await wait_for_text(pilot, "since the run began")
        text = picture(pilot.app).partition("-- styles --")[0]
        named = re.findall(r"^ GPU(\d) +\d+%.*? (\d+)(?: +\W)?$", text, re.MULTILINE)
        assert [int(index) for index, _ in named] == list(range(GPUS)), text
        assert dict(named)[str(HOT)] == "86"


@three_sizes
async def test_where_not_all_have_room_the_one_that_is_held_down_does(view: View, root: Path) -> None:
    app = app_of(view, root, "monitor", run_on_eight(root))
    async with app.run_test(size=(view.columns, view.rows)) as pilot:
        await wait_for_text(pilot, "COMPLETED", f"GPU{HOT}     93%     58%   44%   612   86")
