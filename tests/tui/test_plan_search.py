"""Sweep and where over the plan: by keys, at 80x24, without colour, and a cell goes into the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import recipe_layers, resolve
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.predict import predict
from llmtop.tui.app import LlmtopApp
from llmtop.tui.plans.grid import STAGES, detail_rows, grid_of, grid_rows, legend, mark_of
from llmtop.tui.plans.planning import Draft, evaluate
from llmtop.tui.screens.plan import PlanScreen
from llmtop.tui.widgets.searchviews import SweepView, WhereView
from tests.tui.planapp import SMALL, cursor_to, plan_app, type_in
from tests.tui.tuiruns import MACHINE, screen_text, wait_for, wait_for_text


def eight(**values: object) -> RunSpec:
    layers = recipe_layers(load_recipe("test-8b"))
    values = {**layers[0].values, **values}
    return resolve([type(layers[0])(layers[0].source, "", values)], name="test", machine=MACHINE)


def plan_of(app: LlmtopApp) -> PlanScreen:
    assert isinstance(app.screen, PlanScreen)
    return app.screen


async def opened(pilot: Pilot[int], key: str, *words: str) -> str:
    await wait_for_text(pilot, "✓ fits")
    await pilot.press(key)
    return await wait_for_text(pilot, *words)


@pytest.mark.parametrize("size", [SMALL, (60, 18), (140, 40)])
async def test_the_grid_fits_and_tells_marks_and_the_cell(size: tuple[int, int], root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=size) as pilot:
        shown = await opened(pilot, "s", "ZeRO-3", "micro-batch 4, ZeRO-2", "fits: needs up to", "Take it")
        rows = shown.splitlines()
        assert len(rows) <= size[1] and all(len(row) <= size[0] for row in rows)
        assert "*✓" in shown and "✗" in shown
        assert "Close" in rows[-1] and "Help" in rows[-1]
        for micro_batch in (1, 2, 4, 8, 16, 32, 64):
            assert any(row.strip().startswith(f"{micro_batch} ") for row in rows)


async def test_a_cell_is_taken_into_the_plan(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await opened(pilot, "s", "ZeRO-3")
        await pilot.press("up", "right")
        await wait_for_text(pilot, "micro-batch 2, ZeRO-3")
        await pilot.press("enter")
        await wait_for_text(pilot, "2 edited", "* zero")
        assert plan_of(app).plan is not None
        draft = plan_of(app).plan
        assert draft is not None and draft.draft.edits == {"micro_batch": 2, "zero": 3}
        await pilot.press("s")
        await wait_for_text(pilot, "micro-batch 2, ZeRO-3")
        await pilot.press("end", "home", "escape")
        await wait_for_text(pilot, "2 edited")


async def test_a_refused_cell_says_why_and_is_not_taken(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "offload_optimizer")
        await type_in(app, pilot, "cpu")
        await wait_for_text(pilot, "* offload_optimizer")
        await opened(pilot, "s", "– refused")
        await pilot.press("left", "left")
        await wait_for_text(pilot, "refused: offload_optimizer needs sharding")
        await pilot.press("enter")
        await wait_for_text(pilot, "It cannot run")
        assert isinstance(app.screen, SweepView)


async def test_where_lists_every_gpu_and_takes_one(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        shown = await opened(pilot, "w", "Wh/M", "h100-80gb", "rtx-4090", "estimate", "Take it")
        rows = shown.splitlines()
        assert len(rows) <= SMALL[1] and all(len(row) <= SMALL[0] for row in rows)
        assert "short by" in shown and "all with recompute yes" in shown
        assert isinstance(app.screen, WhereView) and app.screen.found is not None
        first = app.screen.found.rows[0]
        await pilot.press("enter")
        await wait_for_text(pilot, f"{first.gpus} x {first.gpu}", "✓ fits", "edited")
        plan = plan_of(app).plan
        assert plan is not None and plan.prediction is not None and first.brief is not None
        assert plan.prediction.needed_bytes == first.brief.needed_bytes
        # What was taken is searched again, not held fast.
        await pilot.press("w")
        await wait_for_text(pilot, "searched: micro_batch 1 to 64", "Wh/M")
        await pilot.press("q")
        await wait_for(pilot, lambda: isinstance(app.screen, PlanScreen))


async def test_there_is_nothing_to_search_in_a_plan_that_is_not_valid(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "micro_batch")
        await type_in(app, pilot, "many")
        await wait_for_text(pilot, "✗ not valid")
        await pilot.press("s")
        await wait_for_text(pilot, "nothing to sweep")
        await pilot.press("w")
        await wait_for_text(pilot, "nothing to search for")


async def test_help_and_footer_list_the_keys(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=(100, 40)) as pilot:
        shown = await wait_for_text(pilot, "✓ fits", "Sweep", "Where")
        assert "Where" in shown.splitlines()[-1]
        await pilot.press("question_mark")
        await wait_for_text(pilot, "micro-batch by ZeRO stage", "which GPUs it fits on")
        await pilot.press("escape", "s")
        await wait_for_text(pilot, "ZeRO-3", "Take it")
        await pilot.press("question_mark")
        shown = await wait_for_text(pilot, "put what is under the cursor into the plan")
        assert shown.index("Sweep and where") < shown.index("Everywhere")
        await pilot.press("escape", "l", "k")
        await wait_for_text(pilot, "micro-batch 2, ZeRO-3")


def test_cells_are_predictions_of_what_they_set() -> None:
    spec = eight(micro_batch=3)
    grid = grid_of(spec)
    assert grid.micro_batches == (1, 2, 3, 4, 8, 16, 32, 64) and grid.own == (2, 2)
    for (at, stage), cell in grid.cells.items():
        prediction = predict(eight(micro_batch=grid.micro_batches[at], zero=stage))
        assert cell.row is not None and cell.row.brief.needed_bytes == prediction.needed_bytes
        mark = mark_of(cell)[0]
        assert (mark in "✓≈") == bool(prediction.fits) and (mark == "≈") == prediction.tight


@pytest.mark.parametrize("width", [20, 47, 60, 74, 75, 78, 138])
def test_rows_keep_to_the_width_and_tell_without_colour(width: int) -> None:
    grid = grid_of(eight())
    for row in grid_rows(grid, grid.own, width):
        assert row.cell_length <= max(width, 47)
    text = "\n".join(row.plain for row in grid_rows(grid, grid.own, width))
    assert text.count("*") == 1 and "✓" in text and "✗" in text and "█" in text
    assert all(mark in legend() for mark in ("✓", "≈", "✗", "–", "*"))
    for stage in STAGES:
        assert list(detail_rows(grid, (0, stage), max(width, 20)))


async def test_notes_and_the_speed_of_changes_are_shown(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=(140, 60)) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "seq_len")
        await type_in(app, pilot, "200000")
        shown = await wait_for_text(pilot, "note", "131,072 positions")
        assert "tok/s" in shown
        await pilot.press("backspace")
        await wait_for_text(pilot, "✓ fits")
        assert "131,072" not in screen_text(app)


def test_a_plan_has_the_cautions_of_its_run() -> None:
    plan = evaluate(Draft(recipe="test-8b", edits={"seq_len": "200000"}), MACHINE)
    assert any("131,072 positions" in caution for caution in plan.cautions)
    assert evaluate(Draft(recipe="test-8b"), MACHINE).cautions == ()


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
async def test_the_mouse_points_at_a_cell_and_takes_it(root: Path, size: tuple[int, int]) -> None:
    app = plan_app(root)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("s")
        await wait_for_text(pilot, "ZeRO-3", "Take it")
        rows = screen_text(app).splitlines()
        head, wanted = next(row for row in rows if "ZeRO-3" in row), next(r for r in rows if r[1:3] == "2 ")
        at = (head.index("ZeRO-3") + 2, rows.index(wanted))
        await pilot.click(offset=at)
        await wait_for_text(pilot, "micro-batch 2, ZeRO-3")
        await pilot.click(offset=at)
        await wait_for(pilot, lambda: isinstance(app.screen, PlanScreen))
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        spec = app.screen.plan.spec
        assert spec is not None and (spec.options.micro_batch, spec.options.zero) == (2, 3)
