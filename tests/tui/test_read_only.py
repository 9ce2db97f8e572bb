"""Looking on: what changes something is gone from footer and help, and refused where it is pressed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.readonly import refusing
from llmtop.tui.asking.requests import DeleteAsked, StopAsked
from llmtop.tui.keys import HELP, MONITOR_KEYS, changes_something
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import MACHINE, LiveRun, screen_text, wait_for, wait_for_text

SMALL = (100, 30)


def looking_on(start: str, root: Path, run: RunDir | None = None) -> LlmtopApp:
    def never(*_: object) -> None:
        raise AssertionError("something was changed")

    deeds = Deeds(stop=never, detect=lambda: MACHINE, launch=never, delete=never, weigh=never)  # type: ignore[arg-type]
    return LlmtopApp(start, run, root, deeds=deeds, read_only=True)  # type: ignore[arg-type]


async def test_every_screen_says_so_and_refuses(live: LiveRun, root: Path) -> None:
    make_recorded_run(root, steps=3)
    app = looking_on("runs", root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        shown = await wait_for_text(pilot, "● running", "read-only")
        assert "Stop" not in shown and "Delete" not in shown and "Compare" in shown
        for key in ("s", "d"):
            await pilot.press(key)
            await wait_for_text(pilot, "Read-only: nothing is changed")
            app.clear_notifications()
        await pilot.press("question_mark")
        shown = await wait_for_text(pilot, "Esc closes", "watch the run under the cursor")
        assert "delete a run" not in shown and "end the run" not in shown
        await pilot.press("escape", "p")
        shown = await wait_for_text(pilot, "plan", "read-only", "Reset")
        assert "Launch" not in shown.splitlines()[-1]
        await pilot.press("L")
        await wait_for_text(pilot, "Read-only: nothing is changed")


async def test_the_monitor_says_so_and_refuses(
    live: LiveRun, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = looking_on("monitor", root, live.run)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        shown = await wait_for_text(pilot, "20/60", "read-only")
        assert "Stop" not in shown and "Change" not in shown.splitlines()[-1]
        for key in [row.key for row in MONITOR_KEYS if row.changes]:
            await pilot.press(key)
            await wait_for_text(pilot, "Read-only: nothing is changed")
            app.clear_notifications()
        live.end("stopped", "as was asked")
        await wait_for_text(pilot, "STOPPED")
        app.clear_notifications()
        told: list[str] = []
        monkeypatch.setattr(app, "notify", lambda words, **_: told.append(words))
        for key in ("s", "z", "c", "R"):
            await pilot.press(key)
            await wait_for(pilot, lambda: bool(told))
            assert [words for words in told if not words.startswith("Read-only: nothing")] == []
            told.clear()


async def test_a_wish_that_gets_past_the_keys_is_refused_by_the_deeds(live: LiveRun, root: Path) -> None:
    ended = make_recorded_run(root, steps=3)
    app = looking_on("runs", root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "● running")
        app.post_message(DeleteAsked(ended))
        await wait_for_text(pilot, "nothing is changed from here")
        app.clear_notifications()
        app.post_message(StopAsked(live.run))
        await wait_for_text(pilot, "Stop this run?")
        await pilot.press("n")
        await wait_for_text(pilot, "nothing is changed from here")
        assert "Stop requested" not in screen_text(app)


def test_all_deeds_but_looking_are_refused() -> None:
    deeds = refusing(Deeds(detect=lambda: MACHINE))
    assert deeds.detect() is MACHINE
    for name in deeds.__struct_fields__:
        if name not in ("detect", "gpus", "bring"):
            with pytest.raises(UsageError, match="nothing is changed"):
                getattr(deeds, name)()


def test_the_table_marks_what_changes_something() -> None:
    marked = {key.action for _, keys in HELP for key in keys if key.changes}
    assert {"stop", "delete", "launch", "review"} <= marked
    assert all(changes_something(action) for action in marked)
    assert not changes_something("open") and not changes_something("quit")
