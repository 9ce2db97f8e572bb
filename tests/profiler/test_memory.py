"""Predicted against recorded H200 runs, and invariants that hold for every configuration."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.catalog import load_gpu, load_model
from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunOptions, RunSpec, ValueSource
from llmtop.profiler.cost.steptime import predict_step_seconds
from llmtop.profiler.memory.predict import predict, predict_with_suggestions
from llmtop.profiler.memory.result import Component, Moment, Prediction
from tests.h200 import MACHINE, MATRIX, ROWS, measured_peak_bytes, name_of, spec_of

PASSES = (Moment.LOSS_BACKWARD, Moment.LAST_BLOCK_BACKWARD, Moment.FIRST_BLOCK_BACKWARD)


def totals(prediction: Prediction) -> dict[Moment, int]:
    return {moment.name: moment.total_bytes for moment in prediction.moments}


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_recorded_peak_is_predicted_within_half_a_percent(row: dict[str, Any]) -> None:
    prediction = predict(spec_of(row))
    measured = measured_peak_bytes(row)
    assert prediction.peak_allocated_bytes == pytest.approx(measured, rel=0.005)
    assert prediction.peak_allocated_upper_bytes >= measured


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_moment_of_a_recorded_run_is_predicted_within_one_percent(row: dict[str, Any]) -> None:
    moments = totals(predict(spec_of(row)))
    last = row["phases"][1]
    assert moments[Moment.INIT] == pytest.approx(row["init_peak"], rel=0.01)
    assert moments[Moment.FORWARD_END] == pytest.approx(last["fwd_end"], rel=0.01)
    assert max(moments[name] for name in PASSES) == pytest.approx(last["bwd_peak"], rel=0.01)
    assert moments[Moment.OPTIMIZER_STEP] == pytest.approx(last["step_peak"], rel=0.01)
    assert moments[Moment.STEADY] == pytest.approx(last["step_end"], rel=0.01)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_recorded_step_times_are_predicted_within_a_quarter(row: dict[str, Any]) -> None:
    assert predict_step_seconds(spec_of(row)) == pytest.approx(row["step_s"], rel=0.25)


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: str(row["cell"]))
def test_runs_of_the_trainer_itself_are_predicted_within_one_percent(row: dict[str, Any]) -> None:
    """Qwen3, GPT-2, Pythia, Gemma-2, Phi-4, SmolLM2 and Llama: `benchmarks/memory_matrix.py`."""
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="cell", values={**row["cell"], "gpu": "h200"})
    prediction = predict(resolve([layer], name="matrix", machine=MACHINE))
    ranks = row["measured"]["ranks"]
    measured = max(peak for rank in ranks for peak in rank["largest"].values() if peak)
    # ZeRO-3 in fp32 holds weights that it has released (`states.unreleased_bytes`): in the bound only.
    loose = row["cell"]["zero"] == 3 and row["cell"].get("precision") == "fp32"
    assert prediction.peak_allocated_bytes == pytest.approx(measured, rel=0.06 if loose else 0.01)
    assert prediction.peak_allocated_upper_bytes >= measured


def test_host_memory_of_the_recorded_offload_run_is_predicted() -> None:
    (row,) = [row for row in ROWS if row["cell"].get("off_opt")]
    prediction = predict(spec_of(row))
    assert prediction.host_bytes == pytest.approx(row["rss"], rel=0.05)
    assert 0 < prediction.pinned_bytes < prediction.host_bytes


def make(model: str = "llama-3.1-8b", gpu: str = "h200", **options: Any) -> RunSpec:
    loaded = load_model(model)
    return RunSpec(
        name="test",
        options=RunOptions(model=model, gpu=gpu, **options),
        model=loaded.shape,
        gpu=load_gpu(gpu),
        model_source=loaded.source,
    )


def of_before(spec: RunSpec, **shape: Any) -> RunSpec:
    """As it is read from a record whose shape does not tell of attention's scores."""
    record = msgspec.to_builtins(spec)
    del record["model"]["score_dropout"]
    record["model"].update(shape)
    return msgspec.json.decode(msgspec.json.encode(record), type=RunSpec)


def test_a_record_of_before_is_predicted_with_the_dropout_of_its_scores() -> None:
    gpt2 = make("gpt2", attention="eager", micro_batch=8, seq_len=1024)
    assert of_before(gpt2) == gpt2
    lacking = replace(gpt2, model=replace(gpt2.model, score_dropout=0.0))
    assert predict(of_before(gpt2)).peak_allocated_bytes > 1.1 * predict(lacking).peak_allocated_bytes
    off = replace(gpt2, hf_config={"attn_pdrop": 0.0})
    assert of_before(off).model.score_dropout == 0.0
    llama = make(attention="eager")
    assert of_before(llama) == llama
    dropped = of_before(replace(llama, hf_config={"attention_dropout": 0.1}), dropout=0.1)
    assert (dropped.model.dropout, dropped.model.score_dropout) == (0.1, 0.1)
    seed = replace(llama, model=replace(llama.model, family="seed_oss"))
    assert of_before(seed).model.score_dropout == 0.1


def test_the_classic_mixed_precision_example_comes_out() -> None:
    """8e9 weights in fp32 with fp16 copies: 32 + 16 + 16 + 32 + 32 = 128 GB."""
    base = make(zero=0, precision="fp16", micro_batch=1, seq_len=2)
    eight = 8_000_000_000
    # One matrix of a known size stands for the whole model: only the count matters here.
    shape = replace(base.model, num_layers=1, vocab_size=1, tied_embeddings=True)
    spare = eight - sum_params(shape, 0)
    spec = replace(base, model=replace(shape, intermediate_size=spare // (3 * shape.hidden_size)))
    params = predict(spec).params
    moment = next(m for m in predict(spec).moments if m.name is Moment.FIRST_BLOCK_BACKWARD).components
    assert params == pytest.approx(eight, rel=1e-5)
    assert moment[Component.MASTER_PARAMETERS] == 4 * params
    assert moment[Component.PARAMETERS] == 2 * params
    # The tied embedding's gradient is there twice: the head's waits for it.
    assert moment[Component.GRADIENTS] == pytest.approx(2 * params, rel=1e-5)
    assert moment[Component.OPTIMIZER_STATE] == 8 * params
    named = (
        Component.MASTER_PARAMETERS,
        Component.PARAMETERS,
        Component.GRADIENTS,
        Component.OPTIMIZER_STATE,
    )
    assert sum(moment[name] for name in named) == pytest.approx(128e9, rel=1e-5)


def sum_params(shape: Any, width: int) -> int:
    from llmtop.profiler.cost.shape import param_count

    return param_count(replace(shape, intermediate_size=width))


MODELS = [
    "llama-3.2-1b",
    "qwen3-0.6b",
    "gpt2",
    "pythia-1b",
    "gemma-2-2b",
    "phi-4",
    "mixtral-8x7b",
    "llama-3.1-8b",
]


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    lora = draw(st.sampled_from([0, 0, 8, 64]))
    return make(
        draw(st.sampled_from(MODELS)),
        zero=draw(st.integers(0, 3)),
        gpus=draw(st.sampled_from([1, 2, 8])),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        attention=draw(st.sampled_from(["eager", "sdpa"])),
        liger=draw(st.booleans()),
        gradient_checkpointing=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["adamw", "adamw_torch", "adamw_8bit", "paged_adamw_8bit"])),
        lora_rank=lora,
        quantization=draw(st.sampled_from(["none", "nf4"])) if lora else "none",
        micro_batch=draw(st.integers(1, 16)),
        grad_accum=draw(st.sampled_from([1, 4])),
        seq_len=draw(st.sampled_from([128, 512, 1024])),
        offload_optimizer=draw(st.sampled_from(["none", "none", "cpu"])),
    )


@settings(max_examples=200, deadline=None)
@given(specs())
def test_a_moment_is_the_sum_of_its_components_and_the_peak_is_the_largest(spec: RunSpec) -> None:
    prediction = predict(spec)
    for moment in prediction.moments:
        assert moment.total_bytes == sum(moment.components.values())
        assert all(size > 0 for size in moment.components.values())
    assert prediction.peak_allocated_bytes == max(m.total_bytes for m in prediction.moments[1:])
    assert totals(prediction)[prediction.peak_moment] == prediction.peak_allocated_bytes
    low, high = prediction.peak_reserved_bytes
    assert prediction.peak_allocated_bytes <= low <= high
    assert prediction.peak_allocated_upper_bytes >= prediction.peak_allocated_bytes
    assert prediction.trainable_params > 0


@settings(max_examples=100, deadline=None)
@given(specs())
def test_more_tokens_never_need_less(spec: RunSpec) -> None:
    options = spec.options
    base = predict(spec).peak_allocated_bytes
    wider = replace(spec, options=replace(options, micro_batch=options.micro_batch + 1))
    longer = replace(spec, options=replace(options, seq_len=options.seq_len * 2))
    assert predict(wider).peak_allocated_bytes >= base
    assert predict(longer).peak_allocated_bytes >= base


@settings(max_examples=100, deadline=None)
@given(specs())
def test_a_higher_stage_never_holds_more_states_between_steps(spec: RunSpec) -> None:
    if spec.options.offload_optimizer != "none":
        return
    kinds = (Component.MASTER_PARAMETERS, Component.OPTIMIZER_STATE)
    held = []
    for stage in (1, 2, 3):
        moments = predict(replace(spec, options=replace(spec.options, zero=stage))).moments
        held.append(sum(moments[-1].components.get(kind, 0) for kind in kinds))
    assert held == sorted(held, reverse=True)


@settings(max_examples=60, deadline=None)
@given(specs())
def test_states_of_all_ranks_add_up_to_the_whole(spec: RunSpec) -> None:
    whole = replace(spec, options=replace(spec.options, gpus=1))
    kind = Component.MASTER_PARAMETERS
    one = predict(whole).moments[-1].components.get(kind, 0)
    shared = predict(spec).moments[-1].components.get(kind, 0)
    if spec.options.zero == 0:
        assert shared == one
    else:
        assert one <= shared * spec.world_size <= one + 4 * spec.world_size


@settings(max_examples=40, deadline=None)
@given(specs())
def test_suggestions_are_allowed_smaller_and_say_the_truth(spec: RunSpec) -> None:
    from llmtop.profiler.memory.changes import apply

    small = replace(spec, gpu=replace(spec.gpu, memory_bytes=8 << 30))
    if refusals(small):
        return
    prediction = predict_with_suggestions(small)
    if prediction.fits:
        return
    for suggestion in prediction.suggestions:
        changed = apply(small, suggestion.change)
        assert not refusals(changed)
        again = predict(changed)
        assert again.peak_allocated_bytes == suggestion.peak_allocated_bytes
        assert again.fits == suggestion.fits
        # What fits needs less, bounds and all, though its likely peak may lie a little higher.
        assert again.needed_bytes is not None and prediction.needed_bytes is not None
        assert again.needed_bytes < prediction.needed_bytes


def test_a_run_that_does_not_fit_is_told_how_it_would() -> None:
    prediction = predict_with_suggestions(make(gpu="rtx-4090", zero=2, micro_batch=4, seq_len=4096))
    assert prediction.fits is False
    assert any(suggestion.fits for suggestion in prediction.suggestions)


def test_unknown_memory_gives_no_verdict() -> None:
    spec = make()
    unknown = replace(spec, gpu=replace(spec.gpu, memory_bytes=None))
    prediction = predict_with_suggestions(unknown)
    assert prediction.fits is None
    assert prediction.suggestions == ()


ZERO = "zero_optimization"


def test_quantized_gradients_change_memory_between_nodes_only() -> None:
    raw = {ZERO: {"zero_quantized_gradients": True}}
    key = f"not counted, though it changes memory: deepspeed.{ZERO}.zero_quantized_gradients"
    assert (not_counted(raw), not_counted(raw, nodes=2, precision="fp16")) == ([], [key])


def not_counted(raw: dict[str, Any], **options: Any) -> list[str]:
    values = {
        **{"model": "llama-3.2-1b", "zero": 3, "offload_optimizer": "cpu"},
        **{"deepspeed": raw, **options},
    }
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=values)
    told = predict(resolve([layer], name="test", machine=MACHINE)).assumptions
    return [line for line in told if line.startswith("not counted")]


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"torch_autocast": {"enabled": "true"}}, "torch_autocast.enabled"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype"),
        ({ZERO: {"offload_optimizer": {"super_offload": True}}}, f"{ZERO}.offload_optimizer.super_offload"),
        ({ZERO: {"offload_optimizer": {"ratio": 0.3}}}, f"{ZERO}.offload_optimizer.ratio"),
        ({ZERO: {"zero_quantized_weights": True}}, f"{ZERO}.zero_quantized_weights"),
    ],
)
def test_raw_keys_that_change_memory_uncounted_are_told(raw: dict[str, Any], key: str) -> None:
    assert not_counted(raw) == [f"not counted, though it changes memory: deepspeed.{key}"]


def test_buffers_of_gpudirect_storage_are_told_where_there_are_some() -> None:
    raw = {"aio": {"use_gds": True}}
    swapped = not_counted(raw, offload_param="nvme", nvme_path="/nvme")
    assert (swapped, not_counted(raw)) == (
        ["not counted, though it changes memory: deepspeed.aio.use_gds"],
        [],
    )


def test_raw_keys_that_change_nothing_are_not_told() -> None:
    assert not_counted({"compile": {"deepcompile": True}}) == []
    block = {"offload_optimizer": {"ratio": 1.0, "super_offload": False}}
    assert not_counted({"bf16": {"bf16_optimizer_states": False}, ZERO: block}) == []
    assert not_counted({"data_types": {"grad_accum_dtype": "torch.bfloat16"}}) == []
