"""The search over the plan: from its folder alone, begun and ended by keys, and the winner into the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.calibration import save
from llmtop.trainer.tune.journal import Asked, Line, TuneDir
from llmtop.trainer.tune.judged import judged
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.screens.plan import PlanScreen
from llmtop.tui.screens.tune import TuneScreen
from tests.profiler.test_calibration import calibration
from tests.recorded_spec import recorded_spec
from tests.tui.planapp import SMALL
from tests.tui.tuiruns import MACHINE, wait_for, wait_for_text, without_notes

START = {"zero": 2, "offload_optimizer": "none", "offload_param": "none", "micro_batch": 4,
         "checkpointing": "none", "attention": "sdpa", "liger": False, "buckets": None}  # fmt: skip


def ended(number: int, seconds: float | None, **change: object) -> Line:
    return Line(
        event="ended",
        number=number,
        choice={**START, **{k: v for k, v in change.items() if not k.startswith("grad")}},
        change=dict(change),
        at=0.0,
        outcome="measured" if seconds else "out_of_memory",
        step_seconds=seconds,
        error_seconds=0.01,
        spread_seconds=0.02,
        steps_measured=4,
        tokens_per_second=1000 / seconds if seconds else None,
        predicted_step_seconds=1.0,
    )


class Searching:
    """Deeds that write what a search would, and start nothing."""

    def __init__(self) -> None:
        self.tune: TuneDir | None = None
        self.ended: list[str] = []

    def search(self, spec: RunSpec, tune: TuneDir | None, root: Path) -> TuneDir:
        self.tune = tune or TuneDir.create(root, Asked(spec=spec))
        return self.tune

    def interrupt(self, tune: TuneDir) -> bool:
        self.ended.append(tune.tune_id)
        return True

    def app(self, root: Path, *, read_only: bool = False) -> LlmtopApp:
        deeds = Deeds(detect=lambda: MACHINE, search=self.search, interrupt=self.interrupt)
        return LlmtopApp("plan", root=root, recipe="test-8b", deeds=deeds, read_only=read_only)


@pytest.mark.parametrize("size", [SMALL, (60, 18), (140, 40)])
async def test_without_a_search_the_ranking_is_shown_and_s_begins_one(
    size: tuple[int, int], root: Path
) -> None:
    deeds = Searching()
    app = deeds.app(root)
    async with app.run_test(size=size, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("t")
        shown = await wait_for_text(pilot, "may fit", "predicted", "nothing was measured yet", "s begins")
        rows = shown.splitlines()
        assert len(rows) <= size[1] and all(len(row) <= size[0] for row in rows)
        offered = [" ".join(row.split()) for row in rows if row.lstrip().startswith("· ")]
        assert len(set(offered)) == len(offered) >= 3, "no two look alike"
        assert "measured" not in shown.replace("nothing was measured", ""), "no empty column"
        await pilot.press("x")
        await wait_for_text(pilot, "No search goes on.")
        await pilot.press("s")
        await wait_for_text(pilot, "begins;")
        assert deeds.tune is not None and deeds.tune.asked().spec.model.name == "llama-3.1-8b"


async def test_a_search_is_shown_as_it_goes_and_the_best_is_taken(root: Path) -> None:
    deeds = Searching()
    app = deeds.app(root)
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("t")
        await wait_for_text(pilot, "s begins")
        await pilot.press("s")
        await wait_for(pilot, lambda: deeds.tune is not None)
        assert deeds.tune is not None
        with deeds.tune.held():
            deeds.tune.append(ended(1, 1.0))
            deeds.tune.append(ended(2, 0.5, micro_batch=2, grad_accum=2, liger=True))
            deeds.tune.append(ended(3, None, micro_batch=1, grad_accum=4))
            began = replace(ended(4, None, attention="eager"), event="began", outcome=None)
            deeds.tune.append(began)
            shown = await wait_for_text(
                pilot, "best: micro 2, liger on", "500 ms ± 10.0 ms", "2,000", "out of memory",
                "2.00x as fast as the plan", "goes on, 3 trials so far", "* the plan as it is",
            )  # fmt: skip
            marks = {row.strip()[:2].strip(): row.split() for row in shown.splitlines() if row.strip()}
            heads = next(row.split() for row in shown.splitlines() if "predicted " in row)
            at = {head: heads.index(head) + 1 for head in ("micro", "attn", "liger")}
            told = {mark: {head: row[place] for head, place in at.items()} for mark, row in marks.items()
                    if mark[:1] in "★✓✗▸"}  # fmt: skip
            assert told == {
                "▸": {"micro": "4", "attn": "eager", "liger": "off"},
                "★": {"micro": "2", "attn": "sdpa", "liger": "on"},
                "✗": {"micro": "1", "attn": "sdpa", "liger": "off"},
                "✓*": {"micro": "4", "attn": "sdpa", "liger": "off"},
            }
            assert shown.index("★") < shown.index("✓*") < shown.index("✗")
            await pilot.press("x")
            await wait_for_text(pilot, "it ends with its trial")
            assert deeds.ended == [deeds.tune.tune_id]
            deeds.tune.append(replace(began, event="interrupted"))
        await wait_for_text(pilot, "3 trials; s goes on", "--resume")
        await pilot.press("home", "enter")
        await wait_for(pilot, lambda: isinstance(app.screen, PlanScreen))
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        assert app.screen.plan.draft.edits == {"micro_batch": 2, "grad_accum": 2, "liger": True}


async def test_a_search_of_before_is_found_again_and_a_failed_setting_is_not_taken(root: Path) -> None:
    deeds = Searching()
    app = deeds.app(root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        spec = app.screen.plan.spec
        assert spec is not None
        tune = TuneDir.create(root / "tunes", Asked(spec=spec))
        tune.append(ended(1, None, micro_batch=1, grad_accum=4))
        await pilot.press("t")
        await wait_for_text(pilot, "out of memory", "1 trial; s goes on")
        await pilot.press("home", "enter")
        await wait_for_text(pilot, "nothing to take")
        await pilot.press("s")
        await wait_for(pilot, lambda: deeds.tune is not None)
        assert deeds.tune is not None and deeds.tune.path == tune.path, "it goes on, no other begins"
        await without_notes(pilot)
        await pilot.press("escape")
        await wait_for(pilot, lambda: isinstance(app.screen, PlanScreen))


async def test_who_only_looks_on_begins_and_ends_nothing(root: Path) -> None:
    deeds = Searching()
    app = deeds.app(root, read_only=True)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("t")
        await wait_for_text(pilot, "may fit")
        for key in ("s", "x"):
            await pilot.press(key)
            await wait_for_text(pilot, "Read-only")
        assert deeds.tune is None and deeds.ended == []


async def test_what_cannot_run_here_is_told(root: Path) -> None:
    def refuse(spec: RunSpec, tune: TuneDir | None, where: Path) -> TuneDir:
        raise UsageError("the run wants 2 GPUs, and this machine shows 0", fix="--gpu cpu")

    app = LlmtopApp("plan", root=root, recipe="test-8b", deeds=Deeds(detect=lambda: MACHINE, search=refuse))
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("t")
        await wait_for_text(pilot, "may fit")
        await pilot.press("s")
        await wait_for_text(pilot, "wants 2 GPUs", "fix: --gpu cpu")
        assert isinstance(app.screen, TuneScreen)


async def test_the_ranking_is_by_the_times_that_a_calibration_tells(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `llmtop tune` has it: without one nobody can tell the times of a CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    asked = Asked(spec=recorded_spec("cpu", ranks=1))
    assert judged(asked, here=False).candidates[0].brief.step_seconds is None
    save(asked.spec, calibration(asked.spec))
    app = LlmtopApp("plan", root=root, recipe="test-8b", deeds=Deeds(detect=lambda: MACHINE))
    async with app.run_test(size=SMALL) as pilot:
        screen = TuneScreen(asked.spec, root, Deeds())
        app.push_screen(screen)
        await wait_for(pilot, lambda: screen.settled)
        assert screen.seen is not None
        times = [one.brief.step_seconds for one in screen.seen.following]
    assert len(times) > 2 and None not in times
