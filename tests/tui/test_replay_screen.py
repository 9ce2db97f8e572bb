"""Replay: the monitor on a record, which plays, holds, goes to steps and findings, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmtop.profiler.record.events import HangSuspected
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.requests import ReplayWish
from llmtop.tui.feeds.replaying import SPEEDS, ReplayFeed
from llmtop.tui.screens.replay import ReplayScreen
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.replaybar import replay_row
from tests.cli.conftest import Llmtop, llmtop, runs_root  # noqa: F401 - fixtures
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import LiveRun, screen_text, wait_for, wait_for_text, without_notes

SMALL = (80, 24)


def at_step(app: LlmtopApp, step: int) -> Callable[[], bool]:
    def is_there() -> bool:
        screen = app.screen
        return (
            isinstance(screen, ReplayScreen)
            and screen.view is not None
            and screen.view.state.steps_finished == step
            and screen.position is not None
            and not screen.position.going_to
        )

    return is_there


async def test_goes_to_steps_and_shows_the_run_as_it_was(root: Path) -> None:
    run = make_recorded_run(root, steps=60)
    app = LlmtopApp("replay", run, root, wish=ReplayWish(step=30))
    async with app.run_test(size=SMALL) as pilot:
        await wait_for(pilot, at_step(app, 30), "step 30")
        shown = await wait_for_text(pilot, "30/60", "‖ REPLAY 10x", "● running")
        assert "COMPLETED" not in shown and "Stop" not in shown and "run goes on" not in shown
        await pilot.press("full_stop", "full_stop")
        await wait_for(pilot, at_step(app, 32), "two steps on")
        await pilot.press("comma")
        await wait_for(pilot, at_step(app, 31), "one step back")
        await pilot.press("t", "5", "enter")
        await wait_for(pilot, at_step(app, 5), "step 5")
        await pilot.press("t", "escape", "t", *"999", "enter")
        await wait_for_text(pilot, "there is no step 999")
        await pilot.press("greater_than_sign")
        await wait_for_text(pilot, "COMPLETED: all ranks finished all steps", "✓ completed")
        await pilot.press("less_than_sign")
        await wait_for(pilot, at_step(app, 0), "the beginning")
        await wait_for_text(pilot, "starting")


async def test_the_log_is_as_long_as_it_was(root: Path) -> None:
    run = make_recorded_run(root, steps=60)
    app = LlmtopApp("replay", run, root, wish=ReplayWish(step=30))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, at_step(app, 30), "step 30")
        shown = await wait_for_text(pilot, "step 28 loss")
        assert "step 32 loss" not in shown
        await pilot.press("t", "5", "0", "enter")
        await wait_for_text(pilot, "step 48 loss")
        await pilot.press("t", "1", "0", "enter")
        shown = await wait_for_text(pilot, "step 8 loss")
        assert "step 28 loss" not in shown
        await pilot.press("greater_than_sign")
        await wait_for_text(pilot, "step 60 loss")
        # The other rank wrote little, at the beginning.
        await pilot.press("t", "1", "0", "enter")
        await wait_for_text(pilot, "step 8 loss")
        await pilot.press("8", "right")
        await wait_for_text(pilot, "[rank 1] building")
        await pilot.press("left")
        await wait_for_text(pilot, "step 8 loss", "rank 0")


async def test_a_record_that_does_not_tell_how_long_logs_were_shows_them_whole(root: Path) -> None:
    live = LiveRun(root)
    live.recorder.tells_logs = False
    live.start()
    live.steps(1, 40)
    live.close()
    app = LlmtopApp("replay", live.run, root, wish=ReplayWish(step=10))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, at_step(app, 10), "step 10")
        await wait_for_text(pilot, "step 40 loss", "rank 0, whole, as its times were not recorded")


async def test_plays_and_holds_at_a_pace(root: Path) -> None:
    run = make_recorded_run(root, steps=60)
    app = LlmtopApp("replay", run, root, wish=ReplayWish(step=1))
    async with app.run_test(size=SMALL) as pilot:
        await wait_for(pilot, at_step(app, 1), "step 1")
        await pilot.press("plus")
        await wait_for_text(pilot, "REPLAY 20x")
        await pilot.press("minus", "minus")
        await wait_for_text(pilot, "REPLAY 5x")
        await pilot.press(*["plus"] * len(SPEEDS))
        await wait_for_text(pilot, "REPLAY 1000x")
        await pilot.press("space")
        await wait_for_text(pilot, "COMPLETED", "‖ REPLAY")
        await pilot.press("space")
        await wait_for_text(pilot, "COMPLETED", "‖ REPLAY")


async def test_goes_to_findings(root: Path) -> None:
    live = LiveRun(root)
    live.start()
    live.steps(1, 20)
    live.recorder.time.advance(90)
    live.recorder.supervisor.write(HangSuspected(last_step=20, quiet_seconds=90.0, threshold_seconds=60.0))
    live.steps(21, 60)
    live.recorder.end("completed", 60)
    live.close()
    app = LlmtopApp("replay", live.run, root, wish=ReplayWish(step=10))
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for(pilot, at_step(app, 10), "step 10")
        for _ in range(20):
            await pilot.press("n")
            await wait_for(pilot, lambda: not app.screen.position.going_to, "a finding")  # type: ignore[attr-defined]
            if "! no step for" in screen_text(app):
                break
        await wait_for_text(pilot, "! no step for", "20/60")
        await pilot.press("greater_than_sign")
        await wait_for_text(pilot, "COMPLETED")
        while "! no step for" not in screen_text(app):
            before = app.screen.position  # type: ignore[attr-defined]
            await pilot.press("N")
            await wait_for(pilot, lambda: app.screen.position != before)  # type: ignore[attr-defined]  # noqa: B023
            assert "there is no finding before" not in screen_text(app)


async def test_from_the_runs_and_back_and_nothing_is_asked(root: Path) -> None:
    run = make_recorded_run(root, steps=8)
    asked: list[str] = []
    deeds = Deeds(stop=lambda found, save: asked.append(found.run_id))
    app = LlmtopApp("runs", root=root, deeds=deeds)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ completed")
        await pilot.press("v")
        await wait_for(pilot, lambda: isinstance(app.screen, ReplayScreen))
        await wait_for_text(pilot, "REPLAY")
        await pilot.press("s")
        await wait_for_text(pilot, "This is a replay")
        await without_notes(pilot)
        await pilot.press("1")
        await wait_for(pilot, lambda: app.screen.zoomed is not None)  # type: ignore[attr-defined]
        await pilot.press("escape", "escape")
        await wait_for(pilot, lambda: isinstance(app.screen, RunsScreen))
        await pilot.press("q")
    assert asked == [] and app.farewell == "" and app.return_value == 0
    assert run.path.is_dir()


def test_the_feed_ends_where_reading_the_run_ends(root: Path) -> None:
    run = make_recorded_run(root, steps=40)
    now = [0.0]
    feed = ReplayFeed(run, ReplayWish(speed=1000), clock=lambda: now[0])
    for _ in range(200):
        now[0] += 0.1
        feed.poll()
        if feed.ended:
            break
    assert feed._seen == read_state(run)


def test_a_run_without_an_end_is_lost_at_the_end_only(root: Path) -> None:
    run = make_recorded_run(root, steps=10, end=None)
    run.supervisor_pid_path.write_text('{"pid": 999999999, "started_ticks": 1}')
    feed = ReplayFeed(run, ReplayWish(step=5))
    states = []
    for _ in range(400):
        view = feed.poll()
        if view is not None:
            states.append(view.state)
        if feed.position().step == 5 and feed.position().read_share == 1.0:
            break
    assert states[-1].status == "running"
    feed.go("end")
    view = feed.poll()
    assert view is not None and view.state.status == "lost"
    assert feed.poll() is None


def test_a_replay_stands_at_the_step_that_the_run_went_on_after(root: Path) -> None:
    live = LiveRun(root, steps=12)
    live.start()
    live.steps(1, 6)
    live.end("stopped", "asked")
    live.go_on(after=4)
    live.close()
    feed = ReplayFeed(live.run, ReplayWish(step=6))
    while feed.position().read_share < 1:
        feed.poll()
    assert feed.position().step == 6
    feed.go("end")
    feed.poll()
    assert feed.position().step == 4


@pytest.mark.parametrize("width", [8, 20, 40, 80, 200])
def test_the_bar_is_one_row(width: int, root: Path) -> None:
    feed = ReplayFeed(make_recorded_run(root, steps=5), ReplayWish(step=3))
    for _ in range(50):
        feed.poll()
    assert replay_row(feed.position(), width).cell_length <= width


def test_the_command_needs_a_terminal_and_a_sane_speed(llmtop: Llmtop, runs_root: Path) -> None:  # noqa: F811
    run: RunDir = make_recorded_run(runs_root, steps=3)
    answer = llmtop("replay", run.run_id)
    assert answer.code == 2 and "needs a terminal" in answer.err and "llmtop report" in answer.err
    assert "between 1 and 1000" in llmtop("replay", run.run_id, "--speed", "0").err
