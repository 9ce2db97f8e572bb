"""The monitor at its edges: a run that ends under a question, leaving it, and narrow terminals."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.presets.errors import LlmtopError
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.commandlist import KeyCommands
from llmtop.tui.screens.runs import RunsScreen
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text

SMALL = (80, 24)


@pytest.mark.parametrize(
    ("end", "words"), [("completed", "completed"), ("out_of_memory", "ran out of memory")]
)
async def test_leaving_an_ended_run_names_its_report(end: str, words: str, root: Path) -> None:
    run = make_recorded_run(root, end=end)  # type: ignore[arg-type]
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for(pilot, lambda: isinstance(app.screen, RunsScreen) and bool(app.screen.rows))
        await pilot.press("enter")
        await wait_for_text(pilot, "peak predicted")
        await pilot.press("q")
    assert app.farewell == f"The run {words}.\nIts report: llmtop report {run.run_id}"
    assert app.return_code == 0


async def test_leaving_from_another_run_speaks_of_the_one_that_the_command_is_about(root: Path) -> None:
    own, other = make_recorded_run(root), make_recorded_run(root, end="failed")
    app = LlmtopApp("monitor", own, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "completed", "peak predicted")
        app.watch_run(other)
        await wait_for_text(pilot, "failed", "peak predicted")
        await pilot.press("q")
    assert app.farewell == f"The run completed.\nIts report: llmtop report {own.run_id}"
    assert app.return_code == 0


async def test_a_note_hides_no_figure_and_one_that_is_long_is_read_whole(root: Path) -> None:
    app = LlmtopApp("monitor", make_recorded_run(root), root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "peak predicted")
        await wait_for(pilot, lambda: app.settled)
        await pilot.pause()
        *before, keys = screen_text(app).splitlines()
        await pilot.press("s")
        shown = await wait_for_text(pilot, "It has ended already. R goes on with it.")
        assert shown.splitlines()[:-1] == before and keys[:20] == shown.splitlines()[-1][:20]
        app.clear_notifications()
        why = " ".join(f"word-{number}" for number in range(30))
        app.say(LlmtopError("It cannot be changed", why=why, fix="wait"))
        rows = (await wait_for_text(pilot, "It cannot be changed", "fix: wait")).splitlines()
        told = " ".join(row.split("▌")[-1].rstrip(" ─").strip() for row in rows if "▌" in row)
        assert why in told and rows[:12] == before[:12]


@pytest.mark.parametrize("width", [60, 120])
async def test_an_ended_run_says_what_follows_once_it_is_left(width: int, live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root, leads_to="the report")
    async with app.run_test(size=(width, 24)) as pilot:
        assert "q: the report" not in await wait_for_text(pilot, "20/60")
        live.end("completed", "all 2 ranks finished step 60")
        await wait_for_text(pilot, "COMPLETED", "q: the report")


async def test_a_run_that_ends_takes_the_question_about_it_away(live: LiveRun, root: Path) -> None:
    asked: list[str] = []
    app = LlmtopApp("monitor", live.run, root, deeds=Deeds(stop=lambda run, save: asked.append(run.run_id)))
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("s")
        await wait_for_text(pilot, "go back, the run goes on")
        live.end("completed", "all 2 ranks finished step 60")
        await wait_for_text(pilot, "COMPLETED", "The run completed.")
        assert "the run goes on" not in screen_text(app)
        for key in ("s", "z", "c"):
            app.clear_notifications()
            await pilot.press(key)
            await wait_for_text(pilot, "It has ended already.")
        assert "Stop this run?" not in screen_text(app)
    assert asked == []


async def test_a_stopped_run_says_how_it_goes_on(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")

        def offered() -> str:
            return "\n".join(entry.words for entry in KeyCommands(app.screen)._entries())

        assert "go on with it" not in offered()
        live.end("stopped", "as was asked")
        await wait_for_text(pilot, "STOPPED")
        app.clear_notifications()
        await pilot.press("s")
        await wait_for_text(pilot, "It has ended already.", "R goes on with it.")
        assert "Resume: go on with it" in offered()
        for command in ("report", "export"):
            assert f"llmtop {command} {live.run.run_id}" in offered()
        assert "Switches: switches" not in offered()


async def test_a_few_rows_are_given_to_what_can_be_answered(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(40, 7)) as pilot:
        await wait_for_text(pilot, "running")
        await pilot.press("s")
        shown = await wait_for_text(pilot, "c    save a checkpoint", "n    stop without")
        assert live.run.run_id not in shown


async def test_enter_by_habit_stops_nothing(live: LiveRun, root: Path) -> None:
    asked: list[bool] = []
    app = LlmtopApp("monitor", live.run, root, deeds=Deeds(stop=lambda run, save: asked.append(save)))
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("s")
        await wait_for_text(pilot, "Stop this run?", "⏎ takes the marked row")
        await pilot.press("enter")
        await wait_for(pilot, lambda: "Stop this run?" not in screen_text(app))
        assert asked == []
        await pilot.press("s", "up", "up", "enter")  # marked by hand
        await wait_for(pilot, lambda: asked == [True])


@pytest.mark.parametrize("width", [40, 60, 80, 120])
async def test_no_key_of_the_footer_is_out_of_sight(width: int, live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(width, 18)) as pilot:
        shown = await wait_for_text(pilot, "20/60", "Help")
        last = shown.splitlines()[-1]
        assert "Quit (run goes on)" in last and "? Help" in last
        if width >= 60:
            assert "s Stop" in last and "0-9 Panel" in last and "Esc Back" in last
        if width >= 80:
            assert "w Switches" in last and "l Log" in last


@pytest.mark.parametrize("size", [SMALL, (60, 18)])
async def test_lines_of_the_log_are_not_cut(size: tuple[int, int], live: LiveRun, root: Path) -> None:
    live.log(0, "step 60/60, loss 3.1692, learning rate 0.0001, step time 670 ms\n")
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "20/60")
        app.screen.query_one("#log").focus()
        await wait_for_text(pilot, "step time", "670")
        await pilot.press("0")
        shown = await wait_for_text(pilot, "0 Start-up", "first step")
        await pilot.press("end")
        shown = await wait_for_text(pilot, "weights", "tokenizer")
        assert "…" not in shown.partition("first step")[2]


@pytest.mark.parametrize("width", [44, 60, 80, 120])
async def test_the_id_in_the_header_is_never_cut(width: int, live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(width, 18)) as pilot:
        shown = await wait_for_text(pilot, "20/60", "● running")
        first = shown.splitlines()[0]
        assert live.run.run_id[-4:] in first and "cpu-demo" in first
        if width >= 60:
            assert "tiny-llama" in first and "2 x cpu" in first
