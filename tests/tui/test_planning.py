"""A draft comes to a plan, or to words about what is wrong with it; never to an exception."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmtop.presets.spec import RunOptions, ValueSource
from llmtop.tui.asking.launchtext import launch_command
from llmtop.tui.plans.planning import Draft, choices, evaluate, shown, stepped
from llmtop.tui.widgets.planrows import HELP
from tests.tui.tuiruns import MACHINE

BASE = Draft(recipe="test-8b")


def test_edits_win_over_the_recipe_and_say_so() -> None:
    plan = evaluate(BASE.edited("micro_batch", "8").edited("zero", "3"), MACHINE)
    assert plan.spec is not None and plan.launchable
    assert (plan.spec.options.micro_batch, plan.spec.options.zero) == (8, 3)
    assert plan.spec.provenance["zero"].source is ValueSource.COMMAND_LINE
    assert plan.spec.provenance["model"].source is ValueSource.RECIPE
    assert shown("micro_batch", plan, None) == "8"


def test_reset_and_raw_keys() -> None:
    draft = BASE.changed({"deepspeed.zero_optimization.reduce_bucket_size": 50_000_000, "liger": True})
    plan = evaluate(draft, MACHINE)
    assert plan.spec is not None and plan.spec.options.liger
    assert plan.spec.options.deepspeed == {"zero_optimization": {"reduce_bucket_size": 50_000_000}}
    assert shown("deepspeed", plan, None) == "zero_optimization.reduce_bucket_size=50000000"
    assert draft.reset("deepspeed").reset("liger") == BASE


def test_every_suggestion_can_be_applied() -> None:
    plan = evaluate(BASE.edited("gpus", "1"), MACHINE)
    assert plan.prediction is not None and plan.prediction.fits is False
    for suggestion in plan.prediction.suggestions:
        changed = evaluate(plan.draft.changed(suggestion.change), MACHINE)
        assert changed.prediction is not None, changed.what
        assert changed.prediction.peak_allocated_bytes == suggestion.peak_allocated_bytes
        assert changed.prediction.fits == suggestion.fits


def test_a_deepspeed_file_stands_between_recipe_and_edits(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    draft = BASE.edited("deepspeed_config", str(path))
    plan = evaluate(draft, MACHINE)
    assert plan.spec is not None, plan.what
    assert plan.spec.options.zero == 1
    assert plan.spec.provenance["zero"].source is ValueSource.DEEPSPEED_CONFIG
    plan = evaluate(draft.edited("zero", "3"), MACHINE)
    assert plan.spec is not None and plan.spec.options.zero == 3
    path.write_text("{")
    plan = evaluate(draft, MACHINE)
    assert plan.spec is None and str(path) in plan.what


@pytest.mark.parametrize("key", [key for key in HELP if choices(key) and key != "recipe"])
def test_every_choice_is_one_that_the_option_takes(key: str) -> None:
    for value, _ in choices(key):
        plan = evaluate(Draft(recipe="cpu-demo").edited(key, value), MACHINE)
        assert plan.spec is not None, f"{key} = {value}: {plan.what}"


@pytest.mark.parametrize(
    ("key", "text", "by", "wanted"),
    [
        ("zero", "3", 1, "3"),
        ("zero", "3", -1, "2"),
        ("micro_batch", "4", 1, "8"),
        ("micro_batch", "1", -1, "1"),
        ("lora_rank", "0", 1, "8"),
        ("learning_rate", "2e-05", -1, "1e-05"),
        ("precision", "bf16", 1, "fp32"),
        ("liger", "false", 1, "true"),
        ("data", "builtin:english", 1, None),
    ],
)
def test_stepping(key: str, text: str, by: int, wanted: str | None) -> None:
    assert stepped(key, text, by) == wanted


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RunOptions.__struct_fields__)), st.text(max_size=20))
@example("data", "~nobody-of-this-name/x")
@example("model", "~nobody-of-this-name/x")
@example("deepspeed_config", "\0")
def test_any_text_in_any_option_comes_to_a_plan(key: str, text: str) -> None:
    plan = evaluate(Draft(recipe="cpu-demo").edited(key, text), MACHINE)
    assert (plan.prediction is None) == bool(plan.what)
    shown(key, plan, None)


def test_a_broken_preset_of_the_user_is_a_choice_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "llmtop" / "presets" / "recipes"
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text("zero = \n")
    known = dict(choices("recipe"))
    assert known["bad"].startswith("broken: bad.toml:1") and "cpu-demo" in known
    assert "not valid TOML" in evaluate(Draft(recipe="bad"), MACHINE).what


def test_raw_keys_that_a_launch_would_refuse_are_refused_here() -> None:
    plan = evaluate(Draft(recipe="cpu-demo").edited("deepspeed", "zero_optimization.stagee=1"), MACHINE)
    assert not plan.launchable and "stagee" in plan.what and plan.fix


START = Draft(recipe="cpu-demo", assumed="cpu-demo")


@pytest.mark.parametrize("order", [("model", "gpu"), ("gpu", "model")])
def test_a_recipe_that_nobody_chose_is_left_for_another_model_and_gpu(order: tuple[str, ...]) -> None:
    chosen = {"model": "llama-3.1-8b", "gpu": "a100-80gb"}
    draft = START
    for key in order:
        draft = draft.edited(key, chosen[key])
    plan, bare = evaluate(draft, MACHINE), evaluate(Draft(edits=chosen), MACHINE)
    assert plan.spec is not None and bare.spec is not None
    assert plan.spec.options == bare.spec.options, "as `llmtop plan llama-3.1-8b --gpu a100-80gb` has it"
    assert plan.spec.options.precision == "bf16"
    assert any("the recipe cpu-demo is left" in one for one in plan.cautions)
    assert shown("recipe", plan, None) == "none"
    assert draft.reset("model").reset("gpu") == START and draft.cleared() == START


def test_with_a_gpu_alone_the_model_of_the_recipe_stays() -> None:
    draft = START.edited("gpu", "h200")
    plan = evaluate(draft, MACHINE)
    assert plan.spec is not None and plan.spec.options.model == "tiny-llama-cpu"
    assert plan.spec.options.precision == "bf16"
    assert launch_command(draft, plan.spec).startswith("llmtop run --model tiny-llama-cpu --gpu h200")
    assert draft.edited("gpu", "cpu").recipe == "cpu-demo"


def test_what_stays_of_a_recipe_that_was_chosen_is_said() -> None:
    plan = evaluate(START.edited("recipe", "cpu-demo").edited("gpu", "h200"), MACHINE)
    assert plan.spec is not None and plan.spec.options.precision == "fp32"
    (caution,) = (one for one in plan.cautions if "made for a CPU" in one)
    assert "precision fp32" in caution and "tokenizer bytes" in caution and "full-zero2" in caution
    assert not any("made for a CPU" in one for one in evaluate(Draft(recipe="cpu-demo"), MACHINE).cautions)
