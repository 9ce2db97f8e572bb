"""Predicted resident sets of CPU ranks against recorded ones.

Recorded: 2 cores, torch 2.13 CPU, transformers 5.24, deepspeed 0.19.8, gloo; a Llama of 21 million weights,
5 steps, the largest resident set of rank 0 in MiB.
"""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.presets.hf.config import read_shape
from llmtop.presets.spec import GpuSpec, RunOptions, RunSpec
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component

MIB = 1 << 20
CONFIG = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
RECORDED: list[tuple[dict[str, Any], float]] = [
    ({"zero": 0}, 861.0),
    ({"zero": 1}, 815.8),
    ({"zero": 2}, 819.4),
    ({"zero": 3}, 1026.3),
    ({"zero": 2, "gpus": 1}, 1016.3),
    ({"zero": 2, "micro_batch": 8, "seq_len": 512}, 1786.2),
]


def spec_of(options: dict[str, Any], memory_bytes: int | None = None) -> RunSpec:
    chosen = {"gpus": 2, "precision": "fp32", "micro_batch": 4, "seq_len": 128, **options}
    return RunSpec(
        name="test",
        options=RunOptions(model="recorded", gpu="cpu", **chosen),
        model=read_shape(CONFIG, "recorded", "test"),
        gpu=GpuSpec(name="cpu", kind="cpu", memory_bytes=memory_bytes),
        model_source="",
    )


@pytest.mark.parametrize(("options", "measured_mib"), RECORDED, ids=str)
def test_recorded_ranks_are_predicted_within_three_percent(
    options: dict[str, Any], measured_mib: float
) -> None:
    prediction = predict(spec_of(options))
    assert prediction.peak_allocated_bytes / MIB == pytest.approx(measured_mib, rel=0.03)
    assert prediction.peak_allocated_upper_bytes / MIB >= measured_mib
    assert prediction.peak_device_bytes is None


def test_every_moment_holds_the_runtime_and_adds_up() -> None:
    prediction = predict(spec_of({}))
    for moment in prediction.moments:
        assert moment.components[Component.RUNTIME] > 0
        assert moment.total_bytes == sum(moment.components.values())


def test_the_verdict_counts_all_ranks_of_the_machine() -> None:
    # With what the heap keeps: the machine must hold the whole process.
    one = predict(spec_of({"gpus": 1})).peak_reserved_bytes[1]
    assert predict(spec_of({"gpus": 1}, memory_bytes=one)).fits is True
    assert predict(spec_of({"gpus": 2}, memory_bytes=one)).fits is False
