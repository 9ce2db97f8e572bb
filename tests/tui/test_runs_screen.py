"""The list of runs: reads them in a thread, opens, stops, and survives what it cannot read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.feeds.runsfeed import RunsFeed
from llmtop.tui.screens.monitor import MonitorScreen
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.runcolumns import COLUMNS, shown_columns
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text

SMALL = (80, 24)


async def move_to(pilot: Pilot[Any], run_id: str) -> None:
    """Put the cursor on a run, by the arrow keys."""
    screen = pilot.app.screen
    assert isinstance(screen, RunsScreen)
    ids = [row.run_id for row in screen.rows]
    await pilot.press(*["up"] * len(ids), *["down"] * ids.index(run_id))


async def test_lists_every_run_with_its_figures(live: LiveRun, root: Path) -> None:
    make_recorded_run(root, kind="cuda", steps=8)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        shown = await wait_for_text(pilot, "● running", "✓ completed")
        assert "20/60" in shown and "8/8" in shown and "full-zero2" in shown
        assert "GiB" in shown and "MiB" in shown and "2, 1 going on" in shown
        for word in ("Open", "Filter", "Stop", "Compare", "Quit", "Help"):
            assert word in shown.splitlines()[-1]


async def test_follows_a_run_that_goes_on(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60")
        live.steps(21, 22)
        await pilot.press("f5")
        await wait_for_text(pilot, "22/60")
        live.end("completed", "all done")
        await pilot.press("f5")
        await wait_for_text(pilot, "✓ completed", "1, 0 going on")
        live.recorder.start()
        live.steps(23, 24)
        await wait_for_text(pilot, "● running", "24/60", "1, 1 going on")


async def test_opens_the_run_under_the_cursor_and_comes_back(live: LiveRun, root: Path) -> None:
    other = make_recorded_run(root, kind="cuda", steps=8)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "● running", "✓ completed")
        for wanted in (live.run.run_id, other.run_id):
            await move_to(pilot, wanted)
            await pilot.press("enter")
            await wait_for(pilot, lambda: isinstance(app.screen, MonitorScreen))
            assert isinstance(app.screen, MonitorScreen) and app.screen.run.run_id == wanted
            await pilot.press("escape")
            await wait_for_text(pilot, "● running", "✓ completed")


async def test_stops_a_run_and_not_one_that_has_ended(live: LiveRun, root: Path) -> None:
    asked: list[tuple[str, bool]] = []
    app = LlmtopApp("runs", root=root, deeds=Deeds(stop=lambda run, save: asked.append((run.run_id, save))))
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "● running")
        await pilot.press("s", "n")
        await wait_for(pilot, lambda: asked == [(live.run.run_id, False)])
        live.end("stopped", "on request")
        await pilot.press("f5")
        await wait_for_text(pilot, "■ stopped")
        await pilot.press("s")
        await wait_for_text(pilot, "It has ended already")
    assert len(asked) == 1


async def test_no_runs_says_what_to_do(root: Path) -> None:
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "No runs in", "Press p to plan one")
        await pilot.press("enter", "s")
        await pilot.pause()


async def test_a_broken_run_is_shown_and_harms_nobody(live: LiveRun, root: Path) -> None:
    broken = make_recorded_run(root, steps=3)
    broken.spec_path.write_text('{"schema_version": 1, "name": "[bold]x"')
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "● running", "? lost")
        await move_to(pilot, broken.run_id)
        await pilot.press("enter")
        await wait_for_text(pilot, "cannot be read")


async def test_names_are_not_markup(root: Path) -> None:
    live = LiveRun(root)
    live.close()
    spec = live.run.spec_path.read_text().replace('"cpu-demo"', '"[red]x[/red]\\u001b[31m"')
    live.run.spec_path.write_text(spec)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=(120, 24)) as pilot:
        await wait_for_text(pilot, "[red]x[/red]", "starting")
        await pilot.press("enter")
        await wait_for(pilot, lambda: isinstance(app.screen, MonitorScreen))
        await wait_for_text(pilot, "[red]x[/red]", "0/60")


@pytest.mark.parametrize("width", [10, 40, 60, 80, 100, 200])
def test_columns_fit_and_the_state_always_shows(width: int) -> None:
    titles = [column.title for column in shown_columns(width)]
    assert {"id", "recipe", "state", "step", "age"} <= set(titles)
    if width >= 80:
        assert "memory" in titles and "loss" in titles
    assert len(shown_columns(200)) == len(COLUMNS)


@pytest.mark.parametrize("size", [(40, 12), (20, 5), (200, 60)])
async def test_any_terminal_size(size: tuple[int, int], live: LiveRun, root: Path) -> None:
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "runs")
        await pilot.press("question_mark")
        await pilot.press("escape")
        assert screen_text(app)


async def test_help_lists_the_keys_of_every_screen(root: Path) -> None:
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("question_mark")
        shown = await wait_for_text(pilot, "Everywhere", "Esc closes")
        assert "plan a new run" in shown
        await pilot.press("end")
        await wait_for_text(pilot, "Letters of memory", "Nothing is ever guessed")
        await pilot.press("escape")
        await wait_for(pilot, lambda: "Everywhere" not in screen_text(app))


async def test_a_run_that_ends_takes_the_question_about_it_away(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("s")
        await wait_for_text(pilot, "Stop this run?")
        live.end("stopped", "asked to")
        await wait_for_text(pilot, "The run was stopped.", "■ stopped")
        await wait_for(pilot, lambda: "Stop this run?" not in screen_text(app))


@pytest.mark.parametrize(("key", "title"), [("r", "Runs"), ("p", "Plan")])
async def test_help_begins_with_the_screen_below_it(key: str, title: str, root: Path) -> None:
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=(60, 24)) as pilot:
        await pilot.press(key, "question_mark")
        shown = await wait_for_text(pilot, "Esc closes", title, "Everywhere")
        rows = [row.strip("│─ ▅▇") for row in shown.splitlines()]
        assert rows.index(title) < rows.index("Everywhere")


async def test_help_of_the_monitor_names_the_switches_on_its_first_page(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("question_mark")
        await wait_for_text(pilot, "Esc closes", "w       switches: ")


async def test_before_the_folder_is_read_nothing_is_said_of_it(
    live: LiveRun, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtop.tui.screens.runs.follow_runs", lambda *_: None)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "looking for runs")
        await pilot.resize_terminal(100, 30)
        shown = await wait_for_text(pilot, "looking for runs")
        assert "No runs" not in shown and "going on" not in shown


async def test_a_list_that_is_still_read_says_so_and_no_total_that_is_none(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in range(1, 19):
        make_recorded_run(root, steps=steps)
    reads, go_on = RunsFeed._read, threading.Event()

    def held(feed: RunsFeed, run: RunDir) -> int:
        if len(feed._rows) >= 16:
            assert go_on.wait(60)
        return reads(feed, run)

    monkeypatch.setattr(RunsFeed, "_read", held)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        try:
            shown = await wait_for_text(pilot, "runs  reading, 16 of 18 so far", "✓ completed")
            assert "going on" not in shown
            await pilot.press("slash", *"nobody")
            await wait_for_text(pilot, "reading, 16 of 18 so far", "None of those read so far holds")
            await pilot.press("escape")
        finally:
            go_on.set()
        await wait_for_text(pilot, "runs  18, 0 going on")
