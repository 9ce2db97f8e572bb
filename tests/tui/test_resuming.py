"""A run that has ended goes on from inside the app, after showing from where and with what."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from textual.widgets import Input

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.checkpointevents import CheckpointLoaded
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.logmarks import mark_new_process
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking import deeds as deeds_of_app
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.resuming import ResumeWish, preview_resume
from llmtop.tui.widgets.resumeform import ResumeForm
from tests.recorded import BEGAN, Recorder, make_recorded_run
from tests.tui.test_fixing import as_script
from tests.tui.tuiruns import LiveRun, on_a_small_host, save_step, screen_text, wait_for, wait_for_text

WIDE = (110, 40)


class Asked:
    """Deeds that note how a run is to go on."""

    def __init__(self, refusal: str = "") -> None:
        self.wishes: list[ResumeWish] = []
        self.refusal = refusal

    def deeds(self) -> Deeds:
        return Deeds(resume=self.resume)

    def resume(self, run: RunDir, state: RunState, wish: ResumeWish) -> None:
        self.wishes.append(wish)
        if self.refusal:
            raise LlmtopError("it cannot go on", why=self.refusal)


@pytest.fixture
def stopped(root: Path) -> RunDir:
    """Stopped after step 4 of 60, with a checkpoint of step 4; its supervisor is gone."""
    live = LiveRun(root)
    live.start()
    live.steps(1, 4)
    live.save(4)
    live.end("stopped", "asked to")
    live.close()
    live.run.supervisor_pid_path.unlink()
    return live.run


@pytest.mark.parametrize("start", ["monitor", "runs"])
async def test_a_key_goes_on_from_the_newest_checkpoint(stopped: RunDir, root: Path, start: str) -> None:
    asked = Asked()
    app = LlmtopApp(start, stopped, root, deeds=asked.deeds())  # type: ignore[arg-type]
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await wait_for_text(pilot, "stopped", "R Resume")
        before = app.screen
        await pilot.press("R")
        shown = await wait_for_text(pilot, "Go on with this run", "goes on after step 4 of 60")
        assert "predicted: needs up to" in shown and f"llmtop resume {stopped.run_id}" in shown
        assert sum(isinstance(screen, ResumeForm) for screen in app.screen_stack) == 1
        assert "⏎ starts it" in shown and "shows what it comes to" not in shown
        await pilot.press(*"steps=30")  # words are asked about once more
        await wait_for_text(pilot, "⏎ shows what it comes to", "of 30, from")
        await pilot.press("enter")
        await wait_for_text(pilot, "Go on with this run so?", "⏎ starts it")
        await pilot.press("y")  # nothing is lost, so there is nothing to say it to
        assert isinstance(app.screen, ResumeForm) and asked.wishes == []
        await pilot.press("escape")
        await wait_for_text(pilot, "⏎ shows what it comes to")
        app.screen.query_one(Input).value = ""
        await wait_for_text(pilot, "⏎ starts it", "after step 4 of 60")
        await pilot.press("enter")
        await wait_for(pilot, lambda: asked.wishes == [ResumeWish()], "the wish")
        await wait_for(pilot, lambda: app.screen is not before, "the monitor of the run that goes on")


async def test_steps_that_are_lost_take_a_key_of_their_own(stopped: RunDir, root: Path) -> None:
    shutil.rmtree(stopped.checkpoints_dir)
    asked = Asked("no room on the disk")
    app = LlmtopApp("monitor", stopped, root, deeds=asked.deeds())
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await wait_for_text(pilot, "stopped", "R Resume")
        before = app.screen
        await pilot.press("R")
        shown = await wait_for_text(pilot, "begins anew from step 1: the 4 steps that it had made were not")
        assert f"llmtop resume {stopped.run_id} --anew" in shown
        await pilot.press("enter")
        await wait_for_text(pilot, "4 steps are lost: y begins again from step 1")
        await pilot.press("enter")
        assert isinstance(app.screen, ResumeForm) and asked.wishes == []
        await pilot.press("y")
        await wait_for(pilot, lambda: app.screen is before, "the form goes")
        await wait_for_text(pilot, "no room on the disk")
        assert asked.wishes == [ResumeWish(anew=True)]


async def test_one_key_says_yes_to_no_more_than_is_named(stopped: RunDir, root: Path) -> None:
    """Steps that are lost, and memory that there is not: each by itself, then both of them."""
    checkpoints = stopped.checkpoints_dir / "step-4", stopped.path / "aside"
    large = "micro_batch=20000 grad_accum=1"
    for is_saved, words, told, more in (
        (True, large, "does not fit: y goes on with it all the same", {"force": True}),
        (False, "", "4 steps are lost: y begins again from step 1", {"anew": True}),
        (
            False,
            large,
            "4 steps lost, does not fit: y begins again all the same",
            {"anew": True, "force": True},
        ),
    ):
        if not is_saved and checkpoints[0].exists():
            checkpoints[0].rename(checkpoints[1])
        asked = Asked()
        app = LlmtopApp("monitor", stopped, root, deeds=asked.deeds())
        async with app.run_test(size=(80, 40), notifications=True) as pilot:
            await wait_for_text(pilot, "R Resume")
            await pilot.press("R")
            await wait_for_text(pilot, "Go on with this run")
            app.screen.query_one(Input).value = words
            flags = "".join(f" --{name}" for name in more)
            await wait_for_text(pilot, f"llmtop resume {stopped.run_id}", flags)
            await pilot.press("enter")
            await wait_for_text(pilot, told)
            await pilot.press("enter", "y")
            await wait_for(pilot, lambda asked=asked: bool(asked.wishes))  # type: ignore[misc]
            assert asked.wishes == [ResumeWish(words=tuple(words.split()), **more)]


def test_what_is_likely_not_meant_is_told_as_the_command_line_tells_it(stopped: RunDir) -> None:
    nothing_saved = "mind: nothing is saved: checkpoint_every is 0"

    def told(*words: str) -> int:
        found = preview_resume(stopped, read_state(stopped), words)
        assert found is not None
        return sum(line.strip().startswith(nothing_saved) for line in found.lines)

    assert told() == told("steps=90") == 1
    assert told("checkpoint_every=2") == 0


def test_host_memory_that_is_short_takes_a_key_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = on_a_small_host(root, monkeypatch)
    live.save(4)
    live.end("stopped", "asked to")
    live.close()
    found = preview_resume(live.run, read_state(live.run), ("offload_optimizer=cpu",))
    assert found is not None and found.wish == ResumeWish(words=("offload_optimizer=cpu",), force=True)
    assert found.warning == "too little host memory: y goes on with it all the same"
    assert any(line.endswith("and there is 64.0 MiB here") for line in found.lines)


def test_a_run_that_made_no_step_is_not_said_to_lose_any(root: Path) -> None:
    live = LiveRun(root)
    live.start()
    live.end("failed", "a rank failed")
    live.close()
    found = preview_resume(live.run, read_state(live.run), ())
    assert found is not None and found.wish == ResumeWish(anew=True)
    assert found.warning == "no step was made: y begins again from step 1"
    live.run.supervisor_pid_path.unlink()
    with pytest.raises(UsageError, match=f"llmtop resume {live.run.run_id} --anew begins anew from step 1"):
        deeds_of_app.resume(live.run, deeds_of_app.going_on(live.run), ResumeWish())


async def test_what_is_changed_is_shown_beside_what_it_was(stopped: RunDir, root: Path) -> None:
    asked = Asked()
    app = LlmtopApp("monitor", stopped, root, deeds=asked.deeds())
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await wait_for_text(pilot, "R Resume")
        await pilot.press("R")
        await wait_for_text(pilot, "goes on after step 4")
        await pilot.press(*"steps=3")
        await wait_for_text(pilot, "has made 4 steps, and would be one of 3")
        await pilot.press(*"0 micro_batch=2")
        shown = await wait_for_text(pilot, "of 30, from", "4 -> 2", "predicted, before and then")
        assert f"llmtop resume {stopped.run_id} steps=30 micro_batch=2" in shown
        await pilot.press("enter", "enter")
        await wait_for(pilot, lambda: asked.wishes == [ResumeWish(words=("steps=30", "micro_batch=2"))])


async def test_a_run_that_has_all_its_steps_asks_for_more_of_them(root: Path) -> None:
    run = make_recorded_run(root, steps=3)
    asked = Asked()
    app = LlmtopApp("runs", root=root, deeds=asked.deeds())
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await wait_for_text(pilot, "completed")
        await pilot.press("R")
        await wait_for_text(pilot, "no checkpoint")
        assert not isinstance(app.screen, ResumeForm)
        await pilot.press("escape")  # takes the words away
        save_step(run, 3)
        await pilot.press("R")
        await wait_for_text(pilot, "Go on with this run", "It has made all its", "steps=")
        await pilot.press("enter")  # no words, no question
        assert isinstance(app.screen, ResumeForm)
        await pilot.press(*"steps=900")
        await wait_for_text(pilot, "goes on after step 3 of 900")
        await pilot.press("escape")
        await wait_for(pilot, lambda: not isinstance(app.screen, ResumeForm))
        assert asked.wishes == []


async def test_a_run_that_goes_on_has_no_such_key(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        assert "R Resume" not in await wait_for_text(pilot, "20/60", "q Quit")
        await pilot.press("R")
        await wait_for_text(pilot, "It goes on already.")


async def test_a_command_of_ones_own_says_how_it_is_started_again(stopped: RunDir, root: Path) -> None:
    as_script(stopped)
    app = LlmtopApp("monitor", RunDir(stopped.path), root)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        assert "R Resume" not in await wait_for_text(pilot, "stopped")
        await pilot.press("R")
        await wait_for_text(pilot, "it is a command of your own", "llmtop run -- python")
        assert "Go on with this run" not in screen_text(app)


async def test_the_monitor_of_a_run_that_goes_on_shows_its_new_start(stopped: RunDir, root: Path) -> None:
    """Also where it was resumed from elsewhere while its monitor was open."""
    recorder = Recorder(stopped, stopped.spec(), BEGAN + 900)
    (root / "aside").mkdir()
    recorder.run = RunDir(root / "aside")  # it would begin the log of rank 0 anew
    app = LlmtopApp("monitor", stopped, root)
    async with app.run_test(size=WIDE) as pilot:
        await wait_for_text(pilot, "stopped", "step 4 loss")
        stopped.write_supervisor_pid()
        recorder.start()
        with stopped.log_path(0).open("a") as log:
            log.write("its last words, cut")
        mark_new_process(stopped.log_path(0))
        shown = await wait_for_text(pilot, "goes on, starting", "Start-up", "hand over", "a new one began")
        assert "last words" not in shown and "left n/a" in shown and "3 Loss" not in shown
        for writer in recorder.ranks:
            writer.write(
                CheckpointLoaded(step=2, path="step-2", bytes_read=1, seconds=1.0, zero=2, world_size=2)
            )
        await wait_for_text(pilot, "step 2/60", "left n/a")
        recorder.step(3)
        await wait_for_text(pilot, "step 3/60", "running", "3 Loss")
        await pilot.press("8")
        await wait_for_text(pilot, "its last words, cut", "what is above is of an earlier process")
    recorder.close()
