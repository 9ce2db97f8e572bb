"""Changes in the monitor: the form with its preview, the panel, and the news of how one ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    KeyChange,
    RestageBegan,
    Restaged,
)
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.control import SetParams
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.widgets.changeform import ChangeForm
from tests.recorded import make_recorded_run
from tests.tui.tuiruns import LiveRun, on_a_small_host, screen_text, wait_for, wait_for_text


async def test_times_are_of_the_present_setting_s_steps(live: LiveRun, root: Path) -> None:
    """What slows the steps would else be seen in the time that is left only after 20 of them."""
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(120, 40)) as pilot:
        before = await wait_for_text(pilot, "20/60", "left 0:")
        assert "100 s a step" not in before
        asked = ChangeAsked(setting=1, changes=(KeyChange(key="micro_batch", old=4, new=64),))
        live.run.add_setting(live.spec, live.run.prediction(), {})
        live.recorder.supervisor.write(asked)
        for rank in live.recorder.ranks:
            rank.write(ChangeApplied(setting=1, step=21))
        live.recorder.ranks[0].write(StepFinished(step=21, loss=1.0, step_seconds=100.0, tokens=8))
        await wait_for_text(pilot, "21/60", "left 1:05:00", "1m 40s a step")


class Asked:
    """What the form asked for; `refusal` is the answer."""

    def __init__(self, refusal: str | None = None) -> None:
        self.changes: list[SetParams] = []
        self.refusal = refusal

    def __call__(self, run: RunDir, params: SetParams) -> str | None:
        self.changes.append(params)
        return self.refusal


def app_of(live: LiveRun, root: Path, asked: Asked) -> LlmtopApp:
    return LlmtopApp("monitor", live.run, root, deeds=Deeds(change=asked))


@pytest.mark.parametrize("size", [(80, 24), (120, 30), (60, 20)])
async def test_the_form_shows_what_a_change_comes_to_before_it_is_asked_for(
    live: LiveRun, root: Path, size: tuple[int, int]
) -> None:
    asked = Asked()
    app = app_of(live, root, asked)
    async with app.run_test(size=size, notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("c")
        await wait_for_text(pilot, "Change this run", "key=value")
        await pilot.press(*"micro_batch=2")
        await wait_for_text(pilot, "4 -> 2", "between two steps", "grad_accum", "step time")
        await pilot.press("enter")
        await wait_for_text(pilot, "Change this run so?", "⏎ changes the run now", "step time", "verdict")
        assert asked.changes == []
        await pilot.press("enter")
        await wait_for(pilot, lambda: bool(asked.changes))
        assert asked.changes == [SetParams(words=("micro_batch=2",))]
        await wait_for_text(pilot, "The change is under way.")


async def test_what_cannot_be_is_told_while_typing_and_not_asked_for(live: LiveRun, root: Path) -> None:
    asked = Asked()
    app = app_of(live, root, asked)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("c")
        await wait_for_text(pilot, "Change this run")
        await pilot.press("enter", *"micro_btch=2")
        await wait_for_text(pilot, "did you mean 'micro_batch'?")
        await pilot.press("enter")
        assert isinstance(app.screen, ChangeForm)
        await pilot.press("escape")
        await wait_for(pilot, lambda: not isinstance(app.screen, ChangeForm))
        assert asked.changes == []


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
async def test_words_and_enter_at_one_go_change_nothing(
    live: LiveRun, root: Path, size: tuple[int, int]
) -> None:
    """As a paste or fast fingers do: what a relaunch comes to is shown and waits for its own yes."""
    asked = Asked()
    app = app_of(live, root, asked)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("c", *"zero=1", "enter")
        shown = await wait_for_text(pilot, "Change this run so?", "by a relaunch", "2 -> 1")
        assert "⏎ changes the run now" in shown and "verdict" in shown
        await pilot.press("end")  # what is long scrolls
        await wait_for_text(pilot, "down for")
        await pilot.press("y", "escape")  # back to the words
        await wait_for_text(pilot, "⏎ shows what it comes to")
        await pilot.press("backspace", "3", "enter")
        await wait_for_text(pilot, "2 -> 3", "Change this run so?")
        assert asked.changes == []
        await pilot.press("enter")
        await wait_for(pilot, lambda: bool(asked.changes))
        assert asked.changes == [SetParams(words=("zero=3",))]


async def asked_with_a_key_of_its_own(
    pilot: Pilot[Any], asked: Asked, words: str, *, told: str, warning: str
) -> SetParams:
    """The change that the words come to, against which something is told: enter alone asks for none."""
    await pilot.press("c")
    await wait_for_text(pilot, "Change this run")
    pilot.app.screen.query_one(Input).value = words
    await wait_for_text(pilot, told)
    await pilot.press("enter")
    await wait_for_text(pilot, warning)
    await pilot.press("enter", "enter")
    await pilot.pause()
    assert isinstance(pilot.app.screen, ChangeForm) and asked.changes == []
    await pilot.press("y")
    await wait_for(pilot, lambda: bool(asked.changes))
    (change,) = asked.changes
    return change


async def test_one_that_is_not_predicted_to_fit_takes_a_key_of_its_own(live: LiveRun, root: Path) -> None:
    asked = Asked()
    app = app_of(live, root, asked)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for_text(pilot, "20/60")
        change = await asked_with_a_key_of_its_own(
            pilot,
            asked,
            "micro_batch=20000 keep_global_batch=no",
            told="does not fit",
            warning="y changes it all the same",
        )
        assert change == SetParams(words=("micro_batch=20000",), keep_global_batch=False, force=True)


async def test_host_memory_that_is_short_takes_a_key_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = on_a_small_host(root, monkeypatch)
    asked = Asked()
    app = app_of(live, root, asked)
    async with app.run_test(size=(110, 40), notifications=True) as pilot:
        await wait_for_text(pilot, "4/60")
        change = await asked_with_a_key_of_its_own(
            pilot,
            asked,
            "offload_optimizer=cpu",
            told="of host memory, and there is 64.0 MiB here",
            warning="too little host memory: y changes it all the same",
        )
        assert change == SetParams(words=("offload_optimizer=cpu",), force=True)
    live.close()


def ask(setting: int, key: str, old: object, new: object, *, restage: bool = False) -> ChangeAsked:
    return ChangeAsked(
        setting=setting,
        restage=restage,
        changes=(KeyChange(key=key, old=old, new=new, restage=restage),),
        fits=True,
        old_peak_bytes=800 << 20,
        new_peak_bytes=600 << 20,
        expected_down_seconds=9.0 if restage else 0.0,
    )


@pytest.mark.parametrize("size", [(80, 24), (120, 30), (60, 20)])
async def test_the_panel_tells_each_change_and_how_it_ended(
    live: LiveRun, root: Path, size: tuple[int, int]
) -> None:
    app = app_of(live, root, Asked())
    write = live.recorder.supervisor.write
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("e")
        await wait_for_text(pilot, "e Changes", "nothing was changed")
        live.run.add_setting(live.spec, live.run.prediction(), {})
        write(ask(1, "micro_batch", 4, 2))
        await wait_for_text(pilot, "micro_batch 4 -> 2", "under way")
        for rank in live.recorder.ranks:
            rank.write(ChangeApplied(setting=1, step=21))
        live.steps(21, 26)
        shown = await wait_for_text(pilot, "without a pause", "setting 1 in force", "measured peak")
        assert "predicted peak 800 MiB -> 600 MiB" in " ".join(shown.split())
        write(ChangeRefused(asked=("zero=9",), reason="zero = 9 is not valid"))
        await wait_for_text(pilot, "zero=9", "refused")


async def test_a_relaunch_is_told_with_its_down_time(live: LiveRun, root: Path) -> None:
    app = app_of(live, root, Asked())
    write = live.recorder.supervisor.write
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await wait_for_text(pilot, "20/60")
        await pilot.press("e")
        live.run.add_setting(live.spec, live.run.prediction(), {})
        write(ask(1, "zero", 2, 3, restage=True))
        write(RestageBegan(setting=1, from_setting=0, last_step=20, world_size=2))
        await wait_for_text(pilot, "being started again since step 20", "of about 9.00 s")
        head = screen_text(app).splitlines()[1]
        assert "relaunch: down for" in head and "of about 9.00 s" in head
        live.steps(21, 22)
        stages = {"save": 0.5, "import": 5.0, "first_step": 1.0}
        write(Restaged(setting=1, step=21, down_seconds=7.25, stage_seconds=stages))
        await wait_for_text(pilot, "zero 2 -> 3: from step 21 on, down for 7.25 s")  # the note
        app.clear_notifications()
        shown = await wait_for_text(
            pilot, "from step 21 on, down for 7.25 s", "setting 1 in force  down for 7.25 s in 1 relaunch"
        )
        assert "save 500 ms, import 5.00 s, first step 1.00 s" in " ".join(shown.split())
        live.steps(23, 60)
        live.end("completed", "all done")
        shown = await wait_for_text(pilot, "COMPLETED")
        assert "down for 7.25 s in 1 relaunch" in shown.splitlines()[2]


async def test_an_ended_run_has_no_such_key(root: Path) -> None:
    app = LlmtopApp("monitor", make_recorded_run(root), root)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for_text(pilot, "60/60")
        await pilot.press("c")
        await pilot.pause()
        assert not isinstance(app.screen, ChangeForm)
