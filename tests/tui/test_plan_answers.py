"""The plan where something cannot be done, is wrong, or has little room: it says so, and cuts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.gpuuse import GpusInUse
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.screens.plan import PlanScreen
from llmtop.tui.widgets.editor import Entry
from llmtop.tui.widgets.planrows import PlanRows
from llmtop.tui.widgets.predicted import verdict
from tests.tui.planapp import SMALL, Launched, cursor_to, plan_app, type_in
from tests.tui.tuiruns import MACHINE, screen_text, wait_for, wait_for_text


def footer(app: LlmtopApp) -> str:
    return screen_text(app).splitlines()[-1]


@pytest.mark.parametrize("size", [SMALL, (60, 18)])
async def test_launch_of_what_cannot_run_says_why(size: tuple[int, int], root: Path) -> None:
    launched: Launched = []
    app = plan_app(root, launched)
    async with app.run_test(size=size, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "micro_batch")
        await type_in(app, pilot, "many")
        await wait_for_text(pilot, "✗ not valid")
        await pilot.press("L")
        await wait_for_text(pilot, "Cannot be launched", "micro_batch = 'many'", "fix:")
        await pilot.press("3")
        await wait_for_text(pilot, "There is no change")
        await pilot.press("enter")
        await wait_for(pilot, lambda: "There is no change" not in screen_text(app))
        await pilot.press("escape", "backspace")
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "offload_param")
        await type_in(app, pilot, "cpu")
        await wait_for_text(pilot, "✗ cannot run")
        await pilot.press("L")
        await wait_for_text(pilot, "Cannot be launched", "offload_param")
    assert launched == []


async def test_what_cannot_run_is_not_told_to_fit_and_gets_no_changes(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=(140, 40)) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "offload_param")
        await type_in(app, pilot, "cpu")
        shown = await wait_for_text(pilot, "✗ cannot run", "peak at")
        assert "✓" not in shown and "press its number" not in shown
        assert "needs up to" in shown and "Apply" not in shown
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        edits = app.screen.plan.draft.edits
        await pilot.press("1")
        await pilot.pause()
        assert app.screen.plan.draft.edits == edits


async def test_a_note_is_not_where_a_person_types(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "micro_batch")
        await pilot.press("enter")
        entry = app.screen.query_one(Entry)
        await wait_for(pilot, lambda: entry.has_focus and entry.region.height > 0)
        app.notify("a note that comes late", timeout=60)
        await wait_for_text(pilot, "a note that comes late")
        rows = screen_text(app).splitlines()
        assert next(at for at, row in enumerate(rows) if "a note" in row) < entry.region.y - 2


async def test_the_cursor_stops_at_both_ends(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        rows = app.screen.query_one(PlanRows)
        await pilot.press("up", "up")
        assert rows.key == "recipe"
        await pilot.press("down")
        assert rows.key == "model"
        cursor_to(app, "deepspeed")
        await pilot.press("down", "down")
        assert rows.key == "deepspeed"


async def test_every_wrong_value_is_marked_and_told(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        for key in ("gpus", "nodes", "zero"):
            cursor_to(app, key)
            await type_in(app, pilot, "1" if key == "zero" else "many")
        shown = await wait_for_text(pilot, "gpus = 'many'", "nodes = 'many'", "3 edited")
        assert "✗ gpus" in shown and "✗ nodes" in shown and "* zero" in shown
        cursor_to(app, "gpus")
        await pilot.press("backspace")
        shown = await wait_for_text(pilot, "✗ nodes", "2 edited")
        assert "✗ gpus" not in shown and "gpus = 'many'" not in shown


@pytest.mark.parametrize("recipe", ["test-8b", "cpu-demo"])
async def test_little_room_has_brief_words_on_what_a_run_reads(recipe: str, root: Path) -> None:
    app = plan_app(root, recipe=recipe)
    async with app.run_test(size=SMALL) as pilot:
        shown = await wait_for_text(pilot, "✓ fits", "weights random (real: a folder)")
        assert "data    builtin:english" in shown and "tokens " in shown
        assert "…" not in "".join(row.partition("│")[2] for row in shown.splitlines())
    app = plan_app(root, recipe=recipe)
    async with app.run_test(size=(100, 40)) as pilot:
        await wait_for_text(pilot, "the preset has none", "safetensors)")


async def test_the_moment_of_the_peak_is_in_words(root: Path) -> None:
    app = plan_app(root, recipe="cpu-demo")
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "peak at backward of the loss")


async def test_a_narrow_footer_keeps_help(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=(60, 18)) as pilot:
        await wait_for_text(pilot, "✓ fits", "? Help")
        for word in ("Edit", "Launch", "Quit", "Help"):
            assert word in footer(app)
        await pilot.resize_terminal(40, 18)
        await wait_for(pilot, lambda: "Runs" not in footer(app) and "Help" in footer(app))
        await pilot.resize_terminal(80, 24)
        await wait_for(pilot, lambda: all(word in footer(app) for word in ("Runs", "Reset", "Help")))


async def test_what_hardly_fits_is_told_so(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        plan = app.screen.plan
        assert plan.prediction is not None
        near = replace(plan.prediction, device_memory_bytes=plan.prediction.needed_bytes)
        assert verdict(replace(plan, prediction=near))[0] == "✓ fits, but tight"


async def test_a_gpu_leaves_the_recipe_that_nobody_chose_and_says_so(root: Path) -> None:
    app = LlmtopApp("plan", root=root, deeds=Deeds(detect=lambda: MACHINE))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await wait_for_text(pilot, "tiny-llama-cpu  2 x cpu")
        cursor_to(app, "gpu")
        await type_in(app, pilot, "h200")
        await wait_for_text(pilot, "h200", "the recipe cpu-demo is left")
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        spec = app.screen.plan.spec
        assert spec is not None and spec.options.precision == "bf16"
        await pilot.press("x")
        await wait_for_text(pilot, "tiny-llama-cpu  2 x cpu")


async def test_where_says_that_it_searched_without_the_recipe_that_nobody_chose(root: Path) -> None:
    """Its GPUs are predicted with the defaults, as the plan is that one of them is taken into."""
    app = LlmtopApp("plan", root=root, deeds=Deeds(detect=lambda: MACHINE))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "tiny-llama-cpu  2 x cpu")
        await pilot.press("w")
        await wait_for_text(pilot, "all else as asked", "the recipe cpu-demo is left", "Wh/M")
        await pilot.press("q")
    chosen = LlmtopApp("plan", root=root, recipe="cpu-demo", deeds=Deeds(detect=lambda: MACHINE))
    async with chosen.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "tiny-llama-cpu  2 x cpu")
        await pilot.press("w")
        assert "is left" not in await wait_for_text(pilot, "all else as asked", "Wh/M")
        await pilot.press("q")


async def test_a_driver_that_hangs_is_told_and_a_gpu_can_be_named(root: Path) -> None:
    silent = Machine(gpu="unknown", gpus=1, host_memory_bytes=None, driver_silent=True)
    recipe = root.parent / "any-gpu.toml"
    recipe.write_text('description = "any GPU"\nmodel = "llama-3.1-8b"\n')
    app = LlmtopApp("plan", root=root, recipe=str(recipe), deeds=Deeds(detect=lambda: silent, gpus=GpusInUse))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "✗ not valid", "does not answer", "name one")
        cursor_to(app, "gpu")
        await type_in(app, pilot, "h200")
        await wait_for_text(pilot, "llama-3.1-8b  1 x h200")
