"""Explanations: every line adds up to the predicted bytes, over whatever can be configured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.catalog import load_gpu, load_model
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.memory import explain_sources
from llmtop.profiler.memory.explain import Explanation, explain
from llmtop.profiler.memory.explain_numbers import Counted, Fraction, named, term_words, words
from llmtop.profiler.memory.lora import targets_exist
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component, Moment

MODELS = (
    *("llama-3.2-1b", "llama-3.1-8b", "gpt2", "gemma-2-2b", "mixtral-8x7b", "qwen3-30b-a3b", "phi-4"),
    *("pythia-1b", "qwen3-0.6b", "tiny-llama-cpu"),
)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "zero": st.integers(0, 3),
    "gpus": st.sampled_from((1, 2, 3, 8)),
    "nodes": st.sampled_from((1, 2, 5)),
    "offload_optimizer": st.sampled_from(("none", "cpu", "nvme")),
    "offload_param": st.sampled_from(("none", "cpu", "nvme")),
    "precision": st.sampled_from(("fp32", "fp16", "bf16")),
    "attention": st.sampled_from(("eager", "sdpa", "flash_attention_2")),
    "liger": st.booleans(),
    "gradient_checkpointing": st.booleans(),
    "checkpointing_every": st.sampled_from((1, 2, 3)),
    "checkpointing_reentrant": st.booleans(),
    "optimizer": st.sampled_from(("adamw", "adamw_torch", "adamw_8bit", "paged_adamw_8bit")),
    "quantization": st.sampled_from(("none", "int8", "nf4")),
    "lora_rank": st.sampled_from((0, 8, 64)),
    "lora_targets": st.sampled_from(("all-linear", "attention", "mlp")),
    "micro_batch": st.sampled_from((1, 3, 16)),
    "grad_accum": st.sampled_from((1, 4)),
    "seq_len": st.sampled_from((128, 1000, 4096)),
    "deepspeed": st.sampled_from(
        (
            {},
            {"zero_optimization": {"reduce_bucket_size": 10_000_000, "overlap_comm": True}},
            {"zero_optimization": {"zero_hpz_partition_size": 2}},
        )
    ),
}


def run_of(model: str, gpu: str, **options: Any) -> RunSpec:
    loaded = load_model(model)
    return RunSpec(
        name="test",
        options=RunOptions(model=model, gpu=gpu, nvme_path="/nvme", **options),
        model=loaded.shape,
        gpu=load_gpu(gpu),
        model_source=loaded.source,
        hf_config=loaded.hf_config,
    )


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    """Any run that is not refused: options that refuse it go back to their defaults, one after the other."""
    options = {key: draw(values) for key, values in OPTIONS.items()}
    spec = run_of(draw(st.sampled_from(MODELS)), draw(st.sampled_from(("h200", "t4", "cpu"))), **options)
    defaults = {field: getattr(RunOptions(model="x"), field) for field in options}
    safe = defaults | {"attention": "eager", "precision": "fp32", "seq_len": 128}
    for key in ("quantization", "checkpointing_every", "offload_param", *options):
        if not refusals(spec):
            break
        spec = replace(spec, options=replace(spec.options, **{key: safe[key]}))
    if not targets_exist(spec):
        spec = replace(spec, options=replace(spec.options, lora_targets="all-linear"))
    assert not refusals(spec)
    return spec


def check_sums(explanation: Explanation) -> None:
    for moment in explanation.moments:
        assert moment.total_bytes == sum(one.value for one in moment.components)
        for one in moment.components:
            assert one.value == sum(term.value for term in one.terms)


@settings(max_examples=250, deadline=None)
@given(runs())
def test_every_line_adds_up_to_the_predicted_bytes(spec: RunSpec) -> None:
    prediction = predict(spec)
    explanation = explain(spec)
    check_sums(explanation)
    assert explanation.peak_moment is prediction.peak_moment
    for told, predicted in zip(explanation.moments, prediction.moments, strict=True):
        assert told.name is predicted.name and told.total_bytes == predicted.total_bytes
        assert {one.name: one.value for one in told.components} == predicted.components
    upper, needed, *held = explanation.verdict
    assert (upper.value, needed.value) == (prediction.peak_allocated_upper_bytes, prediction.needed_bytes)
    assert all(one.value == sum(term.value for term in one.terms) for one in explanation.verdict)
    assert len(held) <= (not spec.on_cpu)
    if not spec.on_cpu:
        assert {one.name: one.value for one in explanation.host} == prediction.host.components


@settings(max_examples=60, deadline=None)
@given(runs())
def test_a_formula_that_is_read_as_written_gives_its_value(spec: RunSpec) -> None:
    """Only products of whole numbers here; divisions and roundings are covered by name."""
    for moment in explain(spec).moments:
        for one in moment.components:
            for term in one.terms:
                assert read(term.formula) in (term.value, None), term


def read(formula: str) -> int | None:
    """What somebody would compute by hand; None for divisions and roundings."""
    if any(mark in formula for mark in ("/", "(")):
        return None
    value = -1 if formula.startswith("-") else 1
    for part in formula.removeprefix("-").split(" x "):
        value *= int(part.split(" ")[0].replace(",", ""))
    return value


@settings(max_examples=60, deadline=None)
@given(runs())
def test_every_line_tells_a_source(spec: RunSpec) -> None:
    explanation = explain(spec)
    for moment in explanation.moments:
        for one in moment.components:
            assert all(term.source for term in one.terms), one


def cited(**options: Any) -> str:
    explanation = explain(run_of("llama-3.2-1b", "h200", **options))
    sums = [one for moment in explanation.moments for one in moment.components]
    sums += [*explanation.verdict, *explanation.host]
    return "; ".join(dict.fromkeys(term.source for one in sums for term in one.terms))


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("iger", {"liger": True}),
        ("in 8 bits", {"optimizer": "adamw_8bit"}),
        ("quantize_4bit", {"quantization": "nf4", "lora_rank": 8}),
        ("QLoRA", {"quantization": "nf4", "lora_rank": 8}),
        ("Params4bit", {"quantization": "nf4", "lora_rank": 8, "zero": 3, "gpus": 2}),
    ],
)
def test_what_is_not_in_use_is_not_cited(word: str, options: dict[str, Any]) -> None:
    assert word in cited(**options)
    for plain in ({}, {"zero": 3, "gpus": 2}, {"lora_rank": 8}):
        assert word not in cited(**plain) and "bitsandbytes" not in cited(**plain)


def test_every_function_with_a_row_of_its_own_exists() -> None:
    from importlib import import_module

    for function in explain_sources.RULES:
        module, _, name = function.partition(".")
        assert hasattr(import_module(f"llmtop.profiler.memory.{module}"), name), function


def test_master_weights_read_as_arithmetic() -> None:
    explanation = explain(run_of("llama-3.2-1b", "h200", gpus=2, zero=2))
    step = next(m for m in explanation.moments if m.name is Moment.OPTIMIZER_STEP)
    master = next(one for one in step.components if one.name == Component.MASTER_PARAMETERS)
    (term,) = master.terms
    assert term.formula == "1,235,814,400 trained weights / 2 GPUs x 4 B"
    assert term.value == master.value == 2_471_628_800
    assert "stage_1_and_2.py" in term.source


def test_explaining_leaves_nothing_behind_in_later_predictions() -> None:
    spec = run_of("qwen3-1.7b", "h200", gpus=3, zero=3, lora_rank=8)
    explain(spec)
    prediction = predict(replace(spec, options=replace(spec.options, micro_batch=2)))
    sizes = [size for moment in prediction.moments for size in moment.components.values()]
    assert {type(size) for size in (*sizes, prediction.needed_bytes, prediction.host_bytes)} == {int}


@given(st.integers(-50, 50), st.integers(1, 50), st.integers(-9, 9), st.integers(-9, 9))
def test_numbers_that_remember_count_as_others_do(a: int, b: int, c: int, d: int) -> None:
    one, other = named(a, "ones"), named(b, "others")
    for mine, plain in (
        (one * c + d - other, a * c + d - b),
        (c - one * other, c - a * b),
        (-(-one // other), -(-a // b)),
        ((one + c) // other * d, (a + c) // b * d),
        (one**2 - one, a**2 - a),
        (sum([one, c, other]), a + b + c),
    ):
        assert mine == plain
        if isinstance(mine, Counted):
            assert sum(term.value for term in mine.terms) == plain
    for fraction, real in ((one * 0.5 + c, a * 0.5 + c), (1.0 - one / other, 1.0 - a / b)):
        assert fraction == real
        if isinstance(fraction, Fraction):
            assert round(fraction) == round(real)


@pytest.mark.parametrize(
    ("number", "formula"),
    [
        (named(6, "weights") * 4, "6 weights x 4"),
        (-(-named(7, "weights") // named(2, "ranks")), "ceil(7 weights / 2 ranks)"),
        (named(7, "weights") // named(2, "ranks"), "floor(7 weights / 2 ranks)"),
        (round(named(1000, "weights") * 0.515), "round(1,000 weights x 0.515)"),
        (named(9, "blocks", is_count=True) - 2, "7 blocks"),
    ],
)
def test_formulas_in_words(number: int, formula: str) -> None:
    assert words(number) == formula


def test_a_plain_product_has_the_unit_where_no_factor_has_it() -> None:
    (term,) = (named(5, "weights") * 4).terms
    assert term_words(term, " B") == "5 weights x 4 B"
    (term,) = (named(5, "weights") * named(2, "B", is_bytes=True)).terms
    assert term_words(term, " B") == "5 weights x 2 B"


def test_packed_weights_tell_their_bits_and_who_measured_them() -> None:
    explanation = explain(run_of("llama-3.1-8b", "h200", quantization="nf4", lora_rank=16))
    first = next(m for m in explanation.moments if m.name is Moment.STEADY)
    weights = next(one for one in first.components if one.name == Component.PARAMETERS)
    packed = next(term for term in weights.terms if "round" in term.formula)
    assert packed.formula == "round(6,979,321,856 packed weights x 0.5) B"
    assert packed.value == 3_489_660_928 and "QLoRA" in packed.source
    (scales,) = (term for term in weights.terms if "scales" in term.formula)
    blocks = 6_979_321_856 // 64
    assert scales.value == blocks + 4 * blocks // 256 + 224 * 1092
