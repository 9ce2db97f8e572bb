"""The opened log: searched, filtered, followed or held; and the opened findings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.profiler.record.events import Compiling, HangSuspected
from llmtop.tui.app import LlmtopApp
from llmtop.tui.areas.findings import FindingsArea
from llmtop.tui.areas.log import LogArea
from llmtop.tui.widgets.logsearch import Level, following_match, level_of, marked, matches, of_level
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text

SMALL = (80, 24)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("step 3 loss 2.1", Level.ALL),
        ("[rank0]: UserWarning: deprecated", Level.WARNINGS),
        ("WARNING: tokens were cut", Level.WARNINGS),
        ("/x.py:3: warning: unused", Level.WARNINGS),
        ("torch.OutOfMemoryError: CUDA out of memory", Level.ERRORS),
        ("Traceback (most recent call last):", Level.ERRORS),
        ("E1130 ncclUnhandledCudaError: call failed", Level.ERRORS),
        ("terror of the deep", Level.ALL),
    ],
)
def test_a_lines_level_is_told_by_its_words(line: str, level: Level) -> None:
    assert level_of(line) == level


@given(st.lists(st.text(max_size=20), max_size=40), st.text(min_size=1, max_size=3), st.integers(-1, 40))
def test_next_and_previous_go_round_all_matches(lines: list[str], query: str, at: int) -> None:
    found = matches(lines, query)
    assert all(query.lower() in lines[line].lower() for line in found)
    following = following_match(found, at, 1)
    assert (following is None) == (not found)
    seen, here = [], at
    for _ in found:
        here = following_match(found, here, 1)  # type: ignore[assignment]
        seen.append(here)
    assert sorted(seen) == found
    if found:
        assert following_match(found, found[0], -1) == found[-1]


_SHOWN = st.characters(exclude_categories=["C"])
"""A log is made harmless when it is read."""


@given(st.text(_SHOWN, max_size=40), st.text(_SHOWN, min_size=1, max_size=4))
def test_marking_keeps_the_line(line: str, query: str) -> None:
    assert marked(line, query, current=True).plain == line


def test_small_letters_take_capitals_and_capitals_do_not() -> None:
    lines = ["Loss is NaN", "loss 2"]
    assert matches(lines, "loss") == [0, 1] and matches(lines, "Loss") == [0] and matches(lines, "") == []
    assert of_level(lines, Level.ALL) == [0, 1]


def panel(app: LlmtopApp) -> LogArea:
    return app.screen.query_one(LogArea)


async def test_search_jumps_from_match_to_match_and_holds_the_log(live: LiveRun, root: Path) -> None:
    live.log(0, "".join(f"line {n} {'needle' if n % 50 == 7 else 'hay'}\n" for n in range(200)))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "line 199")
        await pilot.press("8", "home")
        await wait_for_text(pilot, "step 1 loss")
        await pilot.press("slash", *"needle", "enter")
        await wait_for_text(pilot, "line 7 needle", "/needle 1 of 4", "held")
        await pilot.press("n")
        await wait_for_text(pilot, "line 57 needle", "2 of 4")
        await pilot.press("N", "N")
        await wait_for_text(pilot, "line 157 needle", "4 of 4")
        live.log(0, "newest needle\n")
        await wait_for_text(pilot, "4 of 5")
        assert "newest" not in screen_text(app)
        await pilot.press("escape")
        await wait_for(pilot, lambda: "/needle" not in screen_text(app))
        assert app.screen.zoomed is panel(app)  # type: ignore[attr-defined]
        await pilot.press("f")
        await wait_for_text(pilot, "newest needle")


async def test_letters_of_a_search_are_no_keys(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "step 20 loss")
        await pilot.press("8", "slash", *"qsrp1n?", "enter")
        await wait_for_text(pilot, "/qsrp1n? 0")
        assert app.is_running and app.screen.zoomed is panel(app)  # type: ignore[attr-defined]
        await pilot.press("escape", "escape")
        await wait_for_text(pilot, "1 Memory", "8 Log")


async def test_levels_leave_only_what_is_bad(live: LiveRun, root: Path) -> None:
    live.log(0, "warning: small batch\nRuntimeError: shapes differ\nstep 21 loss 3\n")
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "step 21 loss")
        await pilot.press("8", "e")
        shown = await wait_for_text(pilot, "warnings and errors only", "small batch", "shapes differ")
        assert "step 21" not in shown
        await pilot.press("e")
        await wait_for(pilot, lambda: "small batch" not in screen_text(app))
        await wait_for_text(pilot, "errors only", "shapes differ")
        await pilot.press("right")
        await wait_for_text(pilot, "8 Log  rank 1", "no line here is one of errors only")
        await pilot.press("e")
        await wait_for_text(pilot, "building tiny-llama")


async def test_follow_is_held_by_its_key_and_taken_up_again(live: LiveRun, root: Path) -> None:
    live.log(0, "".join(f"line {n}\n" for n in range(60)))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "line 59")
        await pilot.press("8")
        await wait_for_text(pilot, "line 59", "/ search")
        await pilot.press("f")
        await wait_for_text(pilot, "held")
        live.log(0, "later\n")
        await wait_for_text(pilot, "82 lines")
        assert "later" not in screen_text(app)
        await pilot.press("f")
        await wait_for_text(pilot, "later")


async def test_a_finding_is_chosen_and_its_command_copied(live: LiveRun, root: Path) -> None:
    live.recorder.supervisor.write(Compiling(what="cpu_adam"))
    live.recorder.supervisor.write(HangSuspected(last_step=20, quiet_seconds=300.0, threshold_seconds=200.0))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "no step for a long time")
        await pilot.press("7")
        shown = await wait_for_text(pilot, "▸ ✗ no step for a long time", "seen    5m 00s since step 20")
        assert f"llmtop stacks {live.run.run_id}" in shown.replace("\n         ", " ")
        await pilot.press("y")
        await wait_for(pilot, lambda: app.clipboard == f"llmtop stacks {live.run.run_id}")
        await pilot.press("down")
        shown = await wait_for_text(pilot, "▸ i cpu_adam is being compiled", "compiler processes run")
        assert "seen    5m 00s" not in shown
        longer = HangSuspected(last_step=20, quiet_seconds=900.0, threshold_seconds=200.0)
        live.recorder.supervisor.write(longer)
        await wait_for(pilot, lambda: app.screen.view.state.hang_seconds == 900.0)  # type: ignore[attr-defined]
        await wait_for_text(pilot, "▸ i cpu_adam is being compiled")
        await pilot.press("y")
        await wait_for_text(pilot, "No command does it")
        app.clear_notifications()  # Esc takes a note away first
        await wait_for(pilot, lambda: not app.screen.query("Toast"))
        await pilot.press("down", "up", "escape")
        await wait_for_text(pilot, "1 Memory")
        assert not app.screen.query_one(FindingsArea).zoomed
