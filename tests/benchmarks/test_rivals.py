"""Others' formulas give what their authors' examples give, and stay silent where they have no term."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy.estimates import (
    CLOSED_FORMS,
    accelerate_bytes,
    deepspeed_estimates,
    eleuther_bytes,
    megatron_bytes,
)
from benchmarks.accuracy.memtracker import cannot, tracked_bytes
from benchmarks.cells import plan
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.shape import param_count


def _spec(**cell: Any) -> RunSpec:
    machine = Machine(gpu="h200", gpus=cell.get("gpus", 1), host_memory_bytes=None)
    return plan({"gpu": "h200", "model": "llama-3.2-1b", **cell}, machine, name="rival").spec


COUNT = param_count(_spec().model)


def test_accelerate_says_four_times_the_model() -> None:
    assert accelerate_bytes(_spec()).bytes == 8 * COUNT
    assert accelerate_bytes(_spec(precision="fp32")).bytes == 16 * COUNT
    assert accelerate_bytes(_spec(gpus=2, zero=1)).reason == "knows no sharding"


@pytest.mark.parametrize(
    ("zero", "shared", "whole"),
    [(0, 0, 16), (1, 12, 4), (2, 14, 2), (3, 16, 0)],
    ids=lambda value: str(value),
)
def test_eleuther_shares_by_stage(zero: int, shared: int, whole: int) -> None:
    spec = _spec(gpus=2, zero=zero, gradient_checkpointing=True, seq_len=1024)
    activations = 2 * 1024 * 2048 * 16
    said = eleuther_bytes(spec).bytes
    assert said == pytest.approx(COUNT * (whole + shared / 2) + activations, abs=8)


def test_eager_attention_adds_the_squares_and_flash_does_not() -> None:
    eager, flash = (eleuther_bytes(_spec(seq_len=1024, attention=kind)).bytes for kind in ("eager", "sdpa"))
    assert eager is not None and flash is not None
    assert eager - flash == 5 * 32 * 1024 * 1024 * 16
    assert flash == 16 * COUNT + 34 * 1024 * 2048 * 16


def test_megatron_has_18_bytes_a_parameter_and_shards_the_optimizer_alone() -> None:
    ends = 1024 * (5 * 2048 + 4 * 128256)
    activations = 34 * 1024 * 2048 * 16
    assert megatron_bytes(_spec(seq_len=1024)).bytes == 18 * COUNT + activations + ends
    assert megatron_bytes(_spec(seq_len=1024, gpus=2, zero=1)).bytes == 12 * COUNT + activations + ends
    assert megatron_bytes(_spec(gpus=2, zero=3)).reason == "shards the optimizer only"


def test_deepspeed_answers_by_its_own_functions() -> None:
    specs = [
        _spec(zero=2, gpus=2),
        _spec(zero=3, gpus=2),
        _spec(zero=2, offload_optimizer="cpu"),
        _spec(zero=1),
    ]
    two, three, offloaded, silent = deepspeed_estimates(specs)
    largest = 128256 * 2048
    assert two.bytes == 2 * COUNT + 9 * COUNT
    assert three.bytes == 4 * largest + 9 * COUNT
    assert offloaded.bytes == 2 * COUNT
    assert silent.bytes is None and "stage 1" in silent.reason


@pytest.mark.parametrize("cell", [{"lora_rank": 8}, {"lora_rank": 8, "quantization": "nf4"}])
def test_what_no_form_speaks_of_is_not_held_against_it(cell: dict[str, Any]) -> None:
    for form in CLOSED_FORMS.values():
        said = form(_spec(**cell))
        assert said.bytes is None and said.reason
    assert deepspeed_estimates([_spec(**cell)])[0].bytes is None


def test_memtracker_follows_a_plain_loop_on_fake_tensors() -> None:
    spec = _spec(model="tiny-llama-cpu", seq_len=64, micro_batch=2, zero=1)
    assert cannot(spec) is None
    found = tracked_bytes(spec)
    # 16-bit weights, fp32 copies and Adam's moments are there together with either gradient.
    assert found > (2 + 4 + 8 + 4) * param_count(spec.model)
    longer = tracked_bytes(_spec(model="tiny-llama-cpu", seq_len=128, micro_batch=32, zero=1))
    assert longer > found


@pytest.mark.parametrize("cell", [{"zero": 3}, {"gpus": 2}, {"liger": True}, {"offload_optimizer": "cpu"}])
def test_memtracker_says_what_it_cannot_follow(cell: dict[str, Any]) -> None:
    assert cannot(_spec(**cell))
