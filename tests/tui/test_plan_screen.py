"""The plan: each edit predicts again, errors keep the input, fixes apply by one key, launch launches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from textual.pilot import Pilot

from llmtop.presets.catalog import entries
from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.screens.monitor import MonitorScreen
from llmtop.tui.screens.plan import PlanScreen
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.editor import Entry
from llmtop.tui.widgets.planrows import HELP, PlanRows
from llmtop.tui.widgets.predicted import MOST_FIXES
from tests.tui.planapp import SMALL, Launched, cursor_to, plan_app, type_in
from tests.tui.tuiruns import MACHINE, screen_text, wait_for, wait_for_text


async def test_a_recipe_is_predicted_at_once(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        shown = await wait_for_text(pilot, "✓ fits", "peak at", "activations", "host", "step", "8.03B")
        assert "llama-3.1-8b  2 x h200" in shown and "of 140 GiB" in shown
        for word in ("Edit", "Reset", "Launch", "Quit", "Runs", "Help"):
            assert word in shown.splitlines()[-1]


async def test_without_gpus_what_the_parts_add_up_to_and_what_the_verdict_counts_are_told(root: Path) -> None:
    app = plan_app(root, recipe="cpu-demo")
    async with app.run_test(size=SMALL) as pilot:
        shown = await wait_for_text(pilot, "peak at")
    held = re.search(r"each holds ([\d.]+) MiB to ([\d.]+) MiB", shown)
    assert held is not None, shown
    parts = re.findall(r"│ [A-Z] \S.*? ([\d.]+) MiB +\d+%", shown)
    assert sum(map(float, parts)) == pytest.approx(float(held[1]), rel=0.01), shown
    assert re.search(rf"needs up to {2 * float(held[2]) / 1024:.2f} GiB", shown), shown


async def test_arrows_change_the_value_and_the_verdict(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "gpus")
        await pilot.press("left")
        shown = await wait_for_text(pilot, "✗ does not fit", "to make it fit", "1 edited", "* gpus")
        assert "1 x h200" in shown and "Apply" in shown
        await pilot.press("backspace")
        await wait_for_text(pilot, "✓ fits", "2 x h200")


async def with_one_gpu_too_few(app: LlmtopApp, pilot: Pilot[int]) -> Prediction:
    """Take a GPU from the plan that fits; what is then predicted."""
    await wait_for_text(pilot, "✓ fits")
    cursor_to(app, "gpus")
    await pilot.press("left")
    await wait_for_text(pilot, "✗ does not fit")
    assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
    prediction = app.screen.plan.prediction
    assert prediction is not None
    return prediction


async def test_a_fix_is_applied_by_its_number(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        prediction = await with_one_gpu_too_few(app, pilot)
        number = next(n for n, s in enumerate(prediction.suggestions, start=1) if s.fits)
        await pilot.press(str(number))
        await wait_for_text(pilot, "✓ fits", "1 x h200")
        await pilot.press("x")
        await wait_for_text(pilot, "2 x h200")
        await wait_for(pilot, lambda: "edited" not in screen_text(app).splitlines()[0])


async def test_typing_narrows_the_choices_and_predicts_on_the_way(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "model")
        await pilot.press("enter", *"smollm2")
        await wait_for_text(pilot, "smollm2-135m", "smollm2-1.7b", "Take it")
        await pilot.press("-", "1", "3")
        await wait_for_text(pilot, "smollm2-135m  2 x h200", "135M")
        await pilot.press("escape")
        await wait_for_text(pilot, "llama-3.1-8b  2 x h200", "8.03B")
        await pilot.press("enter", *"smollm2-13", "enter")
        await wait_for_text(pilot, "smollm2-135m  2 x h200", "* model")


async def test_a_wrong_value_says_why_and_keeps_the_input(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "micro_batch")
        await pilot.press("enter", *"many", "enter")
        shown = await wait_for_text(pilot, "✗ not valid", "micro_batch = 'many'", "why", "fix")
        assert "✗ micro_batch" in shown and " many" in shown
        await pilot.press("L")
        await pilot.pause()
        assert isinstance(app.screen, PlanScreen)
        await pilot.press("enter", *"2", "enter")
        await wait_for_text(pilot, "✓ fits", "* micro_batch")


async def test_a_combination_that_cannot_run_is_refused_with_its_fix(root: Path) -> None:
    launched: Launched = []
    app = plan_app(root, launched)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "offload_param")
        await pilot.press("enter", *"cpu", "enter")
        await wait_for_text(pilot, "✗ cannot run", "fix", "peak at")
        await pilot.press("L")
        await pilot.pause()
        assert launched == []


async def test_a_missing_model_file_is_an_error_in_place(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "model")
        await type_in(app, pilot, "/no/[such]/config.json")
        await wait_for_text(pilot, "✗ not valid", "/no/[such]/config.json")


async def test_raw_deepspeed_keys_can_be_typed(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "deepspeed")
        await type_in(app, pilot, "zero_optimization.reduce_bucket_size=2e8")
        await wait_for_text(pilot, "* deepspeed", "✓ fits")
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        spec = app.screen.plan.spec
        assert spec is not None
        assert spec.options.deepspeed == {"zero_optimization": {"reduce_bucket_size": 200_000_000}}


async def test_another_recipe_keeps_the_edits(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "steps")
        await pilot.press("enter", *"77", "enter")
        cursor_to(app, "recipe")
        await type_in(app, pilot, "cpu-demo")
        await wait_for_text(pilot, "2 x cpu")
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        spec = app.screen.plan.spec
        assert spec is not None and spec.options.steps == 77 and spec.name == "cpu-demo"


async def test_every_option_has_a_row_and_a_help(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        rows = app.screen.query_one(PlanRows)
        await pilot.press("home")
        for key in HELP:
            assert rows.key == key
            assert HELP[key].split()[0] in screen_text(app) or key == "recipe"
            await pilot.press("down")
            await pilot.pause()
    assert set(HELP) - {"recipe"} == set(RunOptions.__struct_fields__)


async def test_launch_starts_the_run_and_watches_it(root: Path) -> None:
    launched: Launched = []
    app = plan_app(root, launched)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("L")
        await wait_for_text(pilot, "Launch this run?", "llmtop run test-8b", '"stage": 2', "Esc goes back")
        assert launched == []
        await pilot.press("escape", "L")
        shown = await wait_for_text(pilot, "Launch this run?")
        # By the mouse, as Enter does.
        row = next(row for row in shown.splitlines() if "launches" in row)
        await pilot.click(offset=(row.index("launches"), shown.splitlines().index(row)))
        await wait_for(pilot, lambda: isinstance(app.screen, MonitorScreen))
        await wait_for_text(pilot, "starting", "0/100")
    (spec, prediction), *more = launched
    assert more == [] and spec.name == "test-8b" and prediction.fits


async def test_launching_what_does_not_fit_asks_first(root: Path) -> None:
    launched: Launched = []
    app = plan_app(root, launched)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "gpus")
        await pilot.press("left")
        await wait_for_text(pilot, "✗ does not fit")
        await pilot.press("L")
        await wait_for_text(pilot, "not predicted to fit", "y launches it all the same", "Esc goes back")
        await pilot.press("escape")
        await wait_for(pilot, lambda: "all the same" not in screen_text(app))
        assert launched == []
        await pilot.press("L", "L", "enter")
        await wait_for_text(pilot, "launches it all the same")
        assert launched == []
        await pilot.press("y")
        await wait_for(pilot, lambda: len(launched) == 1)


async def test_a_failed_launch_is_told_and_the_plan_stays(root: Path) -> None:
    def launcher(spec: RunSpec, prediction: Prediction, where: Path, visible: str) -> RunDir:
        raise UsageError("this machine has no h200", why="it has no GPU at all", fix="choose gpu = cpu")

    app = LlmtopApp("plan", root=root, recipe="test-8b", deeds=Deeds(detect=lambda: MACHINE, launch=launcher))
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("L")
        await wait_for_text(pilot, "Launch this run?")
        await pilot.press("enter")
        await wait_for_text(pilot, "this machine has no h200", "choose gpu = cpu")
        assert isinstance(app.screen, PlanScreen)


async def test_the_plan_survives_a_look_at_the_runs(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "gpus")
        await pilot.press("right", "r")
        await wait_for(pilot, lambda: isinstance(app.screen, RunsScreen))
        await pilot.press("p")
        await wait_for_text(pilot, "4 x h200", "1 edited")


@pytest.mark.parametrize("size", [(40, 12), (20, 5), (64, 18), (200, 60)])
async def test_any_terminal_size(size: tuple[int, int], root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "llmtop")
        await pilot.press("down", "enter", "q", "w", "down", "up", "escape", "right", "tab", "down", "tab")
        await pilot.pause()
        assert screen_text(app)


async def test_an_unknown_recipe_is_an_error_that_can_be_left(root: Path) -> None:
    app = plan_app(root, recipe="nonsense")
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✗ not valid", "nonsense")
        await pilot.press("enter", *"test-8b", "enter")
        await wait_for_text(pilot, "✓ fits")


@pytest.mark.parametrize(
    ("text", "why"),
    [("model = [", "not valid TOML"), ("no_such_option = 1", "no_such_option"), ("\xff", "UTF-8")],
)
async def test_a_broken_preset_of_a_person_is_named_and_harms_nothing(
    text: str, why: str, root: Path, tmp_path: Path
) -> None:
    recipes = tmp_path / "config" / "llmtop" / "presets" / "recipes"
    (recipes / "bad.toml").write_bytes(text.encode("latin-1"))
    app = plan_app(root)
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("home")
        await wait_for_text(pilot, "! cannot be used: bad.toml")
        await pilot.press("enter", *"bad")
        await wait_for_text(pilot, "✗ not valid", "bad.toml", why)
        await pilot.press("escape")
        await wait_for_text(pilot, "✓ fits", "8B for the tests")
        await pilot.press("right", "left")
        await wait_for_text(pilot, "✓ fits")


async def test_a_recipe_without_description_is_as_good_as_any(root: Path, tmp_path: Path) -> None:
    recipes = tmp_path / "config" / "llmtop" / "presets" / "recipes"
    (recipes / "bare.toml").write_text('model = "llama-3.1-8b"\ngpu = "h200"\ngpus = 4\n')
    app = plan_app(root, recipe="bare")
    async with app.run_test(size=SMALL) as pilot:
        shown = await wait_for_text(pilot, "4 x h200")
        assert "cannot be used" not in shown


async def test_a_closed_list_takes_only_what_is_on_it(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        for key, choice in (("precision", "bf16"), ("gpu", "h200"), ("liger", "true")):
            cursor_to(app, key)
            await pilot.press("enter", *"zzz")
            await wait_for_text(pilot, "none of the choices", "✓ fits")
            await pilot.press("enter")
            await wait_for_text(pilot, choice, "Take it", "✓ fits")
            await pilot.press("escape")
            await wait_for(pilot, lambda: "Take it" not in screen_text(app))
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        assert app.screen.plan.draft.edits == {}


async def test_where_values_came_from_is_still_told_while_the_plan_is_not_valid(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits", "· model", "· gpus")
        cursor_to(app, "seq_len")
        await pilot.press("enter", *"many", "enter")
        await wait_for_text(pilot, "✗ not valid", "✗ seq_len", "· micro_batch")
        cursor_to(app, "micro_batch")
        await wait_for_text(pilot, "from recipe: test-8b.toml")


async def test_no_change_is_cut_short(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        prediction = await with_one_gpu_too_few(app, pilot)
        await pilot.press("tab", "end")
        last = prediction.suggestions[:MOST_FIXES][-1].text.split()[-1]
        shown = await wait_for_text(pilot, "to make it fit", last)
        assert "…" not in shown.partition("to make it fit")[2]


@pytest.mark.parametrize("width", [80, 140])
async def test_the_description_of_a_recipe_is_shown_whole(root: Path, width: int) -> None:
    app = plan_app(root)
    async with app.run_test(size=(width, 40)) as pilot:
        await wait_for_text(pilot, "✓ fits")
        help_area = app.screen.query_one("#option-help")
        # The longest ones: what holds them holds the others.
        for entry in sorted(entries("recipes"), key=lambda entry: len(entry.description))[-2:]:
            cursor_to(app, "recipe")
            await type_in(app, pilot, entry.name)
            last = entry.description.split()[-1]
            await wait_for(pilot, lambda word=last: word in str(help_area.render()))  # type: ignore[misc]


async def test_says_what_a_run_would_start_from(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits", "weights random")
    app = plan_app(root)
    async with app.run_test(size=(140, 40)) as pilot:
        await wait_for_text(pilot, "weights random", "data    builtin:english", "tokens  made from the data")


async def test_several_kernels_can_be_typed_where_one_can_be_chosen(root: Path) -> None:
    app = plan_app(root)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        cursor_to(app, "liger")
        await type_in(app, pilot, "true")
        cursor_to(app, "liger_kernels")
        await pilot.press("enter")
        await wait_for_text(pilot, "rotary positions")
        app.screen.query_one(Entry).value = "rope,swiglu"
        await pilot.press("enter")
        await wait_for_text(pilot, "rope,glu", "2 edited")
        cursor_to(app, "gradient_checkpointing")
        await type_in(app, pilot, "true")
        cursor_to(app, "checkpointing_every")
        await pilot.press("right", "right")
        await wait_for_text(pilot, "4 edited")
        assert isinstance(app.screen, PlanScreen) and app.screen.plan is not None
        spec = app.screen.plan.spec
        assert spec is not None and app.screen.plan.launchable
        assert (spec.options.liger_kernels, spec.options.checkpointing_every) == ("rope,glu", 4)
