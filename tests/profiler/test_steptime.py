"""Step time by its parts: what is launched, what crosses memory, and what the host alone takes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cells import plan
from llmtop.presets.resolve import Machine
from llmtop.profiler.cost.steptime import StepTime, step_time


def parts(model: str, **options: Any) -> StepTime:
    host = Machine(gpu="h200", gpus=1, host_memory_bytes=None)
    found = step_time(plan({"gpu": "h200", "model": model, **options}, host, name="test").spec)
    assert found is not None
    return found


def test_a_small_micro_batch_waits_for_the_host() -> None:
    """Half the tokens take as long, until the device has enough to do."""
    half, whole, many = (parts("smollm2-135m", seq_len=length) for length in (256, 512, 8192))
    assert half.total == whole.total == whole.host_floor
    assert many.total > many.host_floor


def test_scores_that_are_made_again_cross_memory_again() -> None:
    """Of 80 bytes a score 32 are of the forward pass: in 16 bits, with the softmax in fp32."""
    base = {"attention": "eager", "seq_len": 8192, "liger": True}
    plain, again = (parts("qwen2.5-1.5b", gradient_checkpointing=on, **base) for on in (False, True))
    fused = parts("qwen2.5-1.5b", **{**base, "attention": "sdpa"})
    forward = 32 / 80 * (plain.memory - fused.memory)
    assert again.memory - plain.memory == pytest.approx(forward, rel=0.05)


def test_matrices_in_8_bits_hold_the_host_up() -> None:
    """As a run on an H200 did: 373 ms for 2 x 1,024 tokens, of which the device works some 40."""
    base = {"lora_rank": 16, "seq_len": 1024, "micro_batch": 2}
    packed, nf4 = (parts("qwen3-0.6b", quantization=kind, **base) for kind in ("int8", "nf4"))
    assert packed.total == packed.host_floor == pytest.approx(0.373, rel=0.15)
    assert nf4.host_floor < 0.7 * packed.host_floor


def test_an_optimizer_in_single_operations_moves_more() -> None:
    one, several = (parts("llama-3.2-3b", optimizer=kind) for kind in ("adamw", "adamw_torch"))
    assert several.optimizer == pytest.approx(2.06 * one.optimizer)


def test_ligers_functions_cost_the_host_their_launches() -> None:
    """Qwen2.5-0.5B on an H200 in micro-batches of one: 0.70 s without them, 1.03 s with them."""
    base = {"seq_len": 4096, "micro_batch": 1, "grad_accum": 8}
    without, some, all_on = (
        parts("qwen2.5-0.5b", liger=bool(kernels), liger_kernels=kernels or "all", **base)
        for kernels in ("", "rms_norm", "all")
    )
    assert without.host_floor < some.host_floor < all_on.host_floor
    assert all_on.total == all_on.host_floor == pytest.approx(1.03, rel=0.05)


def test_recomputation_passes_the_hooks_of_zero_3_once_more() -> None:
    """Llama-3.2-1B on an H200 in micro-batches of one: 2.00 to 2.07 s, with recomputation 2.76 to 3.23 s."""
    base = {"zero": 3, "seq_len": 4096, "micro_batch": 1, "grad_accum": 8}
    kept, again = (parts("llama-3.2-1b", gradient_checkpointing=on, **base) for on in (False, True))
    assert kept.total == pytest.approx(2.04, rel=0.1) and again.total == pytest.approx(2.99, rel=0.1)
