"""What holds for every simulated run, and that it allocates what the formulas say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.predict import predict, predict_closely
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.tape.build import is_covered
from llmtop.profiler.memory.tape.layers import sum_buffer_bytes
from llmtop.profiler.memory.tape.machine import Machine as Device
from llmtop.profiler.memory.tape.run import Taped, machine_of, run_tape, taped

MIB = 2**20


def make(model: str = "qwen3-0.6b", **options: Any) -> RunSpec:
    values = {"model": model, "gpu": "h200", **options}
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=values)
    host = Machine(gpu="h200", gpus=options.get("gpus", 1), host_memory_bytes=None)
    return resolve([layer], name="test", machine=host)


def simulated(spec: RunSpec) -> Taped:
    found = taped(spec, None)
    assert found is not None
    return found


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    return make(
        draw(st.sampled_from(["qwen3-0.6b", "qwen2.5-0.5b", "llama-3.2-1b"])),
        zero=draw(st.sampled_from([1, 2, 3])),
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        seq_len=draw(st.sampled_from([1024, 2048])),
        attention=draw(st.sampled_from(["sdpa", "flash_attention_2"])),
        liger=draw(st.booleans()),
        gradient_checkpointing=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["adamw", "adamw_torch", "adamw_8bit"])),
    )


@settings(max_examples=12, deadline=None)
@given(specs())
def test_the_simulated_run_allocates_what_the_formulas_say(spec: RunSpec) -> None:
    found = simulated(spec)
    assert found.peak_allocated_bytes == pytest.approx(predict(spec).peak_allocated_bytes, rel=0.01)
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch": 4}, {"zero": 3}, {"attention": "eager", "micro_batch": 2}]
)
@pytest.mark.parametrize("model", ["gpt2", "pythia-1b", "phi-4-mini"])
def test_joined_queries_keys_and_values_too(model: str, options: dict[str, Any]) -> None:
    spec = make(model, **{"seq_len": 1024, "zero": 2, **options})
    assert simulated(spec).peak_allocated_bytes == pytest.approx(predict(spec).peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch": 4},
        {"zero": 3, "gpus": 8},
        {"lora_rank": 16, "gradient_checkpointing": True},
        {"lora_rank": 16, "quantization": "nf4"},
        {"attention": "eager", "gradient_checkpointing": True, "checkpointing_reentrant": True},
        {"attention": "flash_attention_2", "gpus": 8, "grad_accum": 2},
    ],
)
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite"])
def test_experts_and_latent_attention_too(model: str, options: dict[str, Any]) -> None:
    spec = make(model, **{"seq_len": 2048, "zero": 2, **options})
    found = simulated(spec)
    # A gradient of all experts waits whole while the bucket before it is reduced: not in the formulas.
    assert found.peak_allocated_bytes == pytest.approx(predict(spec).peak_allocated_bytes, rel=0.02)
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batch": 4, "gradient_checkpointing": True},
        {"zero": 3, "gpus": 8, "gradient_checkpointing": True, "micro_batch": 1},
        {"attention": "eager"},
    ],
)
@pytest.mark.parametrize("model", ["opt-1.3b", "olmo-2-7b", "glm-4-9b", "granite-3.1-2b", "gemma-3-1b"])
def test_what_other_families_do_between_the_products_too(model: str, options: dict[str, Any]) -> None:
    base = {"seq_len": 1024, "micro_batch": 2, "zero": 2, "attention": "flash_attention_2"}
    spec = make(model, **{**base, **options})
    # The formulas do not know which of the blocks that are left ZeRO-3 has gathered (OPT).
    near = 0.02 if options.get("zero") == 3 else 0.01
    assert simulated(spec).peak_allocated_bytes == pytest.approx(predict(spec).peak_allocated_bytes, rel=near)


def test_experts_of_liger_make_gradients_of_frozen_weights_too() -> None:
    """Adapters on attention alone: with Liger a step needs a whole block's experts more."""
    spec = make("qwen3-30b-a3b", zero=2, gpus=8, lora_rank=16, seq_len=512, gradient_checkpointing=True)
    plain, fused = (replace(spec, options=replace(spec.options, liger=liger)) for liger in (False, True))
    found = simulated(fused)
    assert found.peak_allocated_bytes == pytest.approx(predict(fused).peak_allocated_bytes, rel=0.01)
    experts = 2 * sizes_of(spec).experts
    assert found.peak_allocated_bytes > simulated(plain).peak_allocated_bytes + 0.9 * experts


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_head_larger_than_the_bucket_lies_beside_the_share_that_it_begins(gpus: int) -> None:
    """Nothing is reduced before the last norm's gradient comes, when all activations are still there."""
    spec = make("llama-3.1-8b", zero=2, gpus=gpus, seq_len=2048, attention="flash_attention_2")
    assert simulated(spec).peak_allocated_bytes == pytest.approx(
        predict(spec).peak_allocated_bytes, rel=0.003
    )


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw_8bit", "gpus": 8},
        {"micro_batch": 4, "gpus": 4},
        {"liger": True, "micro_batch": 2, "gpus": 8},
        {"offload_optimizer": "cpu", "gpus": 8},
        {"offload_optimizer": "cpu", "liger": True},
    ],
)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.2-3b", "llama-3.1-8b"])
def test_buckets_of_several_ranks_too(model: str, options: dict[str, Any]) -> None:
    """Flat copies of a bucket's parts, heads larger than it, norms on the way to the host."""
    spec = make(model, zero=2, seq_len=1024, attention="flash_attention_2", **options)
    assert simulated(spec).peak_allocated_bytes == pytest.approx(predict(spec).peak_allocated_bytes, rel=0.01)


def test_the_head_of_ligers_fused_loss_is_summed_in_a_third_tensor() -> None:
    """What a run on an H200 held: 17,504 MiB, of which 6 are small tensors' (`memory_matrix.jsonl`)."""
    options = {"liger": True, "liger_kernels": "fused_linear_cross_entropy", "seq_len": 2048}
    spec = make("qwen3-0.6b", zero=1, attention="flash_attention_2", **options)
    assert simulated(spec).peak_reserved_bytes == pytest.approx(17_504 * MIB, abs=8 * MIB)


def test_eager_weights_are_held_to_the_end_of_a_block() -> None:
    """What the MLP makes does not take their place (seen on H200: the same bytes reserved)."""
    spec = make(
        "smollm2-1.7b", micro_batch=8, precision="fp16", attention="eager", gradient_checkpointing=True
    )
    sizes = {"reduce_bucket_size": 1_000_000_000, "allgather_bucket_size": 1_000_000_000}
    spec = replace(spec, options=replace(spec.options, deepspeed={"zero_optimization": sizes}))
    assert simulated(spec).peak_reserved_bytes == pytest.approx(53_520 * MIB, abs=8 * MIB)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_head_that_the_loss_reads_by_itself_stays_gathered(*, checkpointing: bool) -> None:
    """ZeRO-3 gathers it with the whole model's code, so that nothing is gathered beyond its limit."""
    spec = make(
        "llama-3.2-1b", zero=3, gpus=2, seq_len=2048, liger=True, gradient_checkpointing=checkpointing
    )
    assert simulated(spec).peak_allocated_bytes == pytest.approx(predict(spec).peak_allocated_bytes, rel=0.01)


@settings(max_examples=5, deadline=None)
@given(specs())
def test_a_small_device_makes_the_allocator_give_back(spec: RunSpec) -> None:
    free = simulated(spec)
    assert taped(spec, free.peak_reserved_bytes) == free
    limit = free.peak_reserved_bytes - 1
    tight = taped(spec, limit)
    # What it lacks is told apart: pieces of segments that are in use cannot be given back.
    assert tight is not None and tight.peak_reserved_bytes - tight.missing_bytes <= limit


def test_a_device_that_is_full_of_pieces_is_told_of() -> None:
    """It fits by what is allocated, and the simulated allocator still asks for more than there is."""
    spec = make("llama-3.2-1b", zero=2, micro_batch=2, seq_len=512, optimizer="adamw_8bit")
    needed = predict(spec).needed_bytes
    assert needed is not None
    small = replace(spec, gpu=replace(spec.gpu, memory_bytes=needed + 2**20))
    told = predict_closely(small)
    assert told.fits
    assert "expandable_segments:True" in told.assumptions[0]
    assert "expandable_segments:True" not in predict_closely(spec).assumptions[0]


@settings(max_examples=5, deadline=None)
@given(specs())
def test_the_close_prediction_differs_in_what_is_held_alone(spec: RunSpec) -> None:
    quick, close = predict(spec), predict_closely(spec)
    low, high = close.peak_reserved_bytes
    assert close.peak_allocated_bytes <= low <= high
    assert close.peak_device_bytes is not None and close.peak_device_bytes > low
    assert (close.moments, close.fits, close.needed_bytes) == (quick.moments, quick.fits, quick.needed_bytes)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "gpt-oss-20b"},
        {"model": "llama-3.2-1b", "gpu": "cpu"},
        {"model": "gemma-3-1b", "seq_len": 2048},
        {"model": "llama-3.2-1b", "zero": 3, "offload_optimizer": "nvme", "nvme_path": "/tmp"},
    ],
)
def test_what_has_no_known_order_is_estimated(options: dict[str, Any]) -> None:
    spec = make(**options)
    assert not is_covered(spec)
    assert taped(spec, None) is None
    assert predict_closely(spec) == predict(spec)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 3, "gpus": 8},
        {"zero": 2, "gpus": 4, "grad_accum": 4},
        {"zero": 1, "grad_accum": 2, "deepspeed": {"zero_optimization": {"overlap_comm": True}}},
        {"zero": 0, "gpus": 2, "optimizer": "adamw_torch"},
        {"zero": 0, "precision": "fp32"},
        {"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "grad_accum": 2},
        {"zero": 2, "offload_optimizer": "cpu"},
        {"lora_rank": 16, "quantization": "nf4"},
        {"lora_rank": 16, "quantization": "int8", "gradient_checkpointing": True},
        {"lora_rank": 16, "quantization": "nf4", "zero": 3, "gpus": 2},
        {"attention": "eager", "gradient_checkpointing": True, "checkpointing_reentrant": True},
        {"model": "gemma-2-2b", "attention": "eager", "liger": True},
        {"model": "gpt2", "seq_len": 1024},
        {"model": "pythia-1b", "seq_len": 1024},
        {"optimizer": "paged_adamw_32bit"},
        {"model": "mixtral-8x7b", "zero": 3, "gpus": 8},
        {"model": "qwen3-30b-a3b", "liger": True, "lora_rank": 16, "gradient_checkpointing": True},
        {"model": "qwen1.5-moe-a2.7b", "zero": 1, "grad_accum": 2},
        {"model": "deepseek-v2-lite", "attention": "flash_attention_2", "zero": 3, "gpus": 2},
        {"model": "deepseek-v2-lite", "precision": "fp32", "gradient_checkpointing": True},
        {"model": "deepseek-v3", "lora_rank": 16, "zero": 3, "gpus": 8, "attention": "eager"},
        {"model": "phi-4-mini", "liger": True, "zero": 3, "gpus": 2},
    ],
)
def test_at_the_end_of_a_step_nothing_passing_is_left(options: dict[str, Any]) -> None:
    """A third step leaves the same bytes as the second: nothing is kept that should have gone."""
    spec = make(**options)
    assert not refusals(spec)
    left = [allocated_after(spec, steps) for steps in (2, 3)]
    assert left[0] == left[1] > 0


def allocated_after(spec: RunSpec, steps: int) -> int:
    device: Device = machine_of(spec)
    run_tape(spec, sizes_of(spec), device, steps=steps)
    return device.allocated_bytes


def test_a_sum_over_tokens_needs_a_buffer_from_a_thousand_tokens_on() -> None:
    """2,048 tokens by 2,048 columns: 32 MiB, as recorded; few rows fit a block's own memory."""
    assert sum_buffer_bytes(2048, 2048) == 32 * MIB
    assert sum_buffer_bytes(1000, 2048) == 0
    assert sum_buffer_bytes(2**20, 2**20) == 0
