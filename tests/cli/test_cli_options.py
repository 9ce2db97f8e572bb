"""The table of run options: complete, typed, and silent about what was not given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets import resolve
from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.option_values import merge
from llmtop.presets.spec import RunOptions, RunSpec, ValueSource
from llmtop.tui.commandline import options
from llmtop.tui.commandline.arguments import CommandParser
from llmtop.tui.commands.import_config import command_line
from tests.cli.conftest import Llmtop

LLAMA = ("--model", "llama-3.1-8b", "--gpu", "h100-80gb")


def parse(*words: str) -> RunSpec:
    parser = CommandParser("plan", "[RECIPE] [OPTIONS]", "predict", "llmtop plan")
    options.add_run_arguments(parser)
    return options.resolve_run(parser.parse(words))


def test_every_field_of_a_run_is_an_option_but_raw_deepspeed_keys() -> None:
    assert {row.key for row in options.ROWS} == set(RunOptions.__struct_fields__) - {"deepspeed"}


def test_options_not_given_leave_the_recipe_alone() -> None:
    plain, stepped = parse("cpu-demo"), parse("cpu-demo", "--steps", "7")
    assert stepped.options.steps == 7
    changed = {
        key
        for key in RunOptions.__struct_fields__
        if getattr(plain.options, key) != getattr(stepped.options, key)
    }
    assert changed == {"steps"}
    assert plain.provenance["steps"].source is ValueSource.RECIPE
    assert stepped.provenance["steps"].source is ValueSource.COMMAND_LINE
    assert stepped.provenance["steps"].detail == "--steps 7"


def test_without_a_recipe_the_defaults_hold() -> None:
    spec = parse(*LLAMA)
    assert spec.name == "custom"
    assert spec.options.zero == RunOptions(model="x").zero
    assert spec.provenance["model"].source is ValueSource.COMMAND_LINE


def test_switches_have_both_forms() -> None:
    assert parse(*LLAMA, "--liger", "--no-gradient-checkpointing").options.liger
    assert not parse(*LLAMA, "--no-liger").options.liger


def test_set_wins_over_options_and_reaches_raw_deepspeed_keys() -> None:
    spec = parse(*LLAMA, "--set", "deepspeed.zero_optimization.reduce_bucket_size=2e8", "--zero", "3")
    assert spec.options.deepspeed == {"zero_optimization": {"reduce_bucket_size": 2e8}}
    assert parse(*LLAMA, "--set", "zero=1", "--zero", "3").options.zero == 1


def test_the_command_line_wins_over_a_deepspeed_file_and_that_over_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}))
    spec = parse("cpu-demo", "--deepspeed-config", str(file))
    assert (spec.options.zero, spec.options.grad_accum) == (3, 4)
    assert spec.provenance["zero"].source is ValueSource.DEEPSPEED_CONFIG
    assert str(file) in spec.provenance["zero"].detail
    spec = parse("cpu-demo", "--deepspeed-config", str(file), "--zero", "1")
    assert (spec.options.zero, spec.options.grad_accum) == (1, 4)


def test_paths_are_absolute_because_the_run_starts_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("words " * 100)
    monkeypatch.chdir(tmp_path)
    assert parse(*LLAMA, "--data", "text.txt").options.data == str(tmp_path / "text.txt")
    spec = parse(*LLAMA, "--data", "builtin:english", "--tokenizer", "bytes")
    assert (spec.options.data, spec.options.tokenizer) == ("builtin:english", "bytes")


@pytest.mark.parametrize("option", ["--data", "--tokenizer", "--nvme-path", "--deepspeed-config"])
def test_no_path_is_not_the_folder_that_somebody_stands_in(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is empty"):
        parse(*LLAMA, option, "")


def test_a_gpu_that_is_named_needs_no_look_at_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> resolve.Machine:
        raise AssertionError("looked at the machine")

    monkeypatch.setattr("llmtop.profiler.hardware.machine.detect_machine", look)
    assert parse(*LLAMA).gpu.name == "h100-80gb"
    with pytest.raises(AssertionError, match="looked"):
        parse("--model", "llama-3.1-8b")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--attention", "flash_attention2"), "did you mean 'flash_attention_2'?"),
        (("--optimizer", "adam8bit"), "did you mean 'adamw_8bit'?"),
        (("--precision", "bf-16"), "did you mean 'bf16'?"),
        (("--zero", "4"), "a whole number from 0 to 3"),
        (("--micro-batch", "0"), "a whole number of 1 or more"),
        (("--micro-batch", "two"), "a whole number of 1 or more"),
        (("--learning-rate", "-1"), "a number above 0"),
        (("--adam-beta1", "1"), "a number from 0 to below 1"),
        (("--micro_batch", "2"), "did you mean '--micro-batch'?"),
        (("--gpu", "h100-81gb"), "h100-80gb"),
        (("--model", "llama3.1-8b"), "llama-3.1-8b"),
        (("--set", "micro_bach=2"), "micro_batch"),
        (("--set", "zero"), "KEY=VALUE"),
    ],
)
def test_a_wrong_option_names_what_would_be_right(words: tuple[str, ...], told: str, llmtop: Llmtop) -> None:
    answer = llmtop("plan", *LLAMA, *words)
    assert answer.code == ExitCode.USAGE
    assert told in answer.err
    assert answer.out == ""


def test_a_model_may_stand_in_the_place_of_a_recipe() -> None:
    named = parse("llama-3.1-8b", "--gpu", "h200")
    assert named == parse("--model", "llama-3.1-8b", "--gpu", "h200")
    with pytest.raises(UsageError, match="llama-3.1-8b"):
        parse("llama-3.1-8b", "--model", "gpt2", "--gpu", "h200")


@pytest.mark.parametrize(
    "question", [(), ("--where",), ("--load",), ("--sweep", "zero=0..1"), ("--explain",)]
)
def test_every_question_takes_a_model_in_the_place_of_a_recipe(
    question: tuple[str, ...], llmtop: Llmtop
) -> None:
    gpu = ("--gpu", "h200")
    named = llmtop("plan", "gpt2", *gpu, *question)
    assert (named.code, named.out) == (
        ExitCode.DONE,
        llmtop("plan", "--model", "gpt2", *gpu, *question).out,
    )


def test_an_unknown_recipe_names_the_nearest(llmtop: Llmtop) -> None:
    answer = llmtop("plan", "cpu-dmeo")
    assert answer.code == ExitCode.USAGE
    assert "cpu-demo" in answer.err


def test_no_model_tells_both_ways_to_give_one() -> None:
    with pytest.raises(UsageError) as caught:
        parse("--zero", "3")
    assert "RECIPE" in caught.value.why and "--model" in caught.value.fix


_KEYS = st.sampled_from(["stage", "device", "ratio", "buckets", "enabled", "betas"])
_LEAVES = st.one_of(
    st.integers(-(10**9), 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.lists(st.integers(0, 9), max_size=3),
    st.text(max_size=8),
    st.sampled_from(["auto", "true", "1e8", "none", "null", "[1]", '"quoted"', ""]),
)
_TABLES = st.recursive(
    st.dictionaries(_KEYS, _LEAVES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(_KEYS, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(_TABLES)
def test_settings_printed_by_import_read_back_as_they_were(table: dict[str, Any]) -> None:
    import shlex

    merged: dict[str, Any] = {}
    words = shlex.split(command_line({"deepspeed": table}))
    for flag, text in zip(words[::2], words[1::2], strict=True):
        assert flag == "--set"
        merged = merge(merged, resolve.parse_set(text))
    assert merged == {"deepspeed": table}
