"""Sweeps: what values a range stands for, that figures are those of `predict`, order and counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import MOST_CANDIDATES, Change, Sweep, changed, parse_axes, sweep
from llmtop.profiler.memory.predict import Brief, predict, predict_brief
from tests.profiler.test_explain import run_of, runs


def swept(text: str, model: str = "llama-3.2-1b", gpu: str = "t4", **options: Any) -> Sweep:
    options = {"precision": "fp16", **options}

    def base_of(change: Change) -> RunSpec:
        return run_of(change.get("model", model), change.get("gpu", gpu), **options)

    return sweep(parse_axes(text), base_of)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("micro_batch=1..64", (1, 2, 4, 8, 16, 32, 64)),
        ("micro_batch=3..20", (3, 6, 12, 20)),
        ("micro-batch=2|7", (2, 7)),
        ("micro=1..2", (1, 2)),
        ("recompute=true|false", (True, False)),
        ("micro_batch=1..2|8..16", (1, 2, 8, 16)),
        ("micro_batch=4..4", (4,)),
        ("micro_batch=1..9+3", (1, 4, 7)),
        ("zero=0..3", (0, 1, 2, 3)),
        ("lora_rank=0..8", (0, 1, 2, 4, 8)),
        ("attention=eager|sdpa", ("eager", "sdpa")),
        ("liger=true|no", (True, False)),
        ("lora_targets=attention|q_proj,v_proj", ("attention", "q_proj,v_proj")),
        ("deepspeed.zero_optimization.reduce_bucket_size=5e7|500000000", (50_000_000, 500_000_000)),
        ("seq_len=2048|2048|4096", (2048, 4096)),
    ],
)
def test_what_values_stand_for(text: str, values: tuple[object, ...]) -> None:
    (axis,) = parse_axes(text)
    assert axis.values == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("micro_batch", ("OPTION=VALUES", "for example")),
        ("micro_batch=", ("OPTION=VALUES",)),
        ("micro_bach=1..4", ("unknown option 'micro_bach'", "did you mean 'micro_batch'")),
        ("micro_batch=0..4", ("micro_batch = 0", "whole number")),
        ("micro_batch=8..1", ("goes down", "micro_batch=1..8")),
        ("zero=0..7", ("zero = 4", "0 to 3")),
        ("attention=eager|spda", ("did you mean 'sdpa'",)),
        ("mikro=1..4", ("did you mean 'micro'",)),
        ("zero=1,zero=2", ("twice",)),
        ("zero=1,micro=2,micro_batch=4", ("micro_batch is there twice",)),
        ("micro_batch=1-64", ("1-64 is no value", "did you mean 'micro_batch=1..64'")),
        ("zero=0:3", ("did you mean 'zero=0..3'",)),
        ("attention=eager,sdpa", ("did you mean 'attention=eager|sdpa'",)),
        ("micro=1, 2,4", ("did you mean 'micro_batch=1|2|4'",)),
        ("gpu=t4,h200,zero=1", ("did you mean 'gpu=t4|h200'",)),
        ("attention=1-2", ("attention = '1-2' is not valid",)),
        ("micro_batch=1..999999999+1", ("too many values",)),
        ("micro_batch=1..1000+1,grad_accum=1..1000+1", ("1,000,000 candidates", f"{MOST_CANDIDATES:,}")),
        ("", ("OPTION=VALUES",)),
    ],
)
def test_a_wrong_sweep_says_what_is_wrong(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_axes(text)
    for word in words:
        assert word in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(runs())
def test_the_brief_figures_are_those_of_the_prediction(spec: RunSpec) -> None:
    whole, brief = predict(spec), predict_brief(spec)
    assert brief == Brief(**{name: getattr(whole, name) for name in Brief.__struct_fields__})


def test_rows_are_sorted_and_every_candidate_is_accounted_for() -> None:
    found = swept("micro_batch=1..8,zero=0..3,offload_param=none|cpu,attention=eager|sdpa", gpu="h200")
    assert found.candidates == 4 * 4 * 2 * 2
    assert len(found.rows) + sum(one.count for one in found.refused) == found.candidates
    (refused,) = found.refused
    assert refused.reason == "offload_param needs stage 3" and refused.count == 4 * 3 * 2
    fits = [row.brief.fits for row in found.rows]
    assert fits == sorted(fits, key=lambda one: one is not True) and set(fits) == {True, False}
    rates = [row.brief.tokens_per_second or 0 for row in found.rows if row.brief.fits]
    assert rates == sorted(rates, reverse=True)
    needs = [row.brief.needed_bytes or 0 for row in found.rows if row.brief.fits is False]
    assert needs == sorted(needs) and len(needs) > 1
    assert found.fitting == fits.count(True)


def test_each_row_is_the_prediction_of_its_settings() -> None:
    found = swept("micro_batch=1..4,deepspeed.zero_optimization.reduce_bucket_size=5e7|2e8", gpus=4, zero=1)
    for row in found.rows:
        bucket = row.settings["deepspeed.zero_optimization.reduce_bucket_size"]
        spec = run_of(
            "llama-3.2-1b",
            "t4",
            precision="fp16",
            gpus=4,
            zero=1,
            micro_batch=row.settings["micro_batch"],
            deepspeed={"zero_optimization": {"reduce_bucket_size": bucket}},
        )
        assert predict_brief(spec) == row.brief


def test_models_and_gpus_can_be_swept() -> None:
    found = swept("model=gpt2|smollm2-135m,gpu=t4|h200,seq_len=512|2048")
    assert len(found.rows) == 6
    (refused,) = found.refused
    assert refused.reason == "longer than the position table" and refused.count == 2
    memory = {row.settings["gpu"]: row.brief.device_memory_bytes for row in found.rows}
    assert memory["t4"] != memory["h200"]


def test_targets_that_a_model_lacks_are_refused_by_their_error() -> None:
    found = swept("lora_targets=attention|nothing", lora_rank=8)
    (refused,) = found.refused
    assert "nothing" in refused.reason and len(found.rows) == 1


def test_raw_keys_of_a_candidate_leave_the_others_as_they_are() -> None:
    spec = run_of("gpt2", "h200", deepspeed={"zero_optimization": {"overlap_comm": True}})
    other = changed(spec, {"deepspeed.zero_optimization.reduce_bucket_size": 7, "micro_batch": 2})
    assert other.options.deepspeed == {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 7}}
    assert spec.options.deepspeed == {"zero_optimization": {"overlap_comm": True}}
    assert other.options.micro_batch == 2
