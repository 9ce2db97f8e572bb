"""What ZeRO-3 keeps whole on every rank, against what DeepSpeed marks and what H200 runs held."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.accuracy.rows import completed
from benchmarks.accuracy.score import words
from benchmarks.cells import plan
from benchmarks.rows import Row
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.persistent import Persistent, persistent
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.memory.sizes import sizes_of
from tests.profiler.test_memory import make

AT_STAGE_3 = [row for row in completed() if row["cell"]["zero"] == 3]
LEAST_SHARE = 0.01
"""Of the peak: what is less is judged by that."""


def held_bytes(spec: RunSpec) -> int:
    steady = next(moment for moment in predict(spec).moments if moment.name is Moment.STEADY)
    return steady.components.get(Component.PARAMETERS, 0)


@pytest.mark.parametrize("row", AT_STAGE_3, ids=lambda row: words(row["cell"]))
def test_weights_between_steps_are_those_that_an_h200_held(row: Row) -> None:
    """Norms, biases and adapters whole; scales of packed weights on the device, offloaded or not."""
    host = Machine(gpu="h200", gpus=row["cell"].get("gpus", 1), host_memory_bytes=None)
    spec = plan({"gpu": "h200", **row["cell"]}, host, name="recorded").spec
    rank = row["measured"]["ranks"][0]
    held = rank["events"]["memory_classified.between_steps"]["components"]["parameters"]
    peak = max(size for size in rank["largest"].values() if size)
    assert held_bytes(spec) == pytest.approx(held, abs=0.001 * max(held, LEAST_SHARE * peak))


def with_zero(spec: RunSpec, **keys: Any) -> RunSpec:
    return replace(spec, options=replace(spec.options, deepspeed={"zero_optimization": keys}))


def test_a_tensor_above_the_threshold_is_not_kept() -> None:
    spec = make("llama-3.1-8b", zero=3, gpus=2, lora_rank=16)
    found = persistent(spec, sizes_of(spec))
    norms = 65 * 4096
    assert found.frozen == norms and 0 < found.trained < sizes_of(spec).trainable
    none = with_zero(spec, stage3_param_persistence_threshold=0)
    assert persistent(none, sizes_of(none)) == Persistent(0, 0, 0)
    everything = with_zero(spec, stage3_param_persistence_threshold=10**12)
    sizes = sizes_of(everything)
    kept = persistent(everything, sizes)
    assert kept.trained == sizes.trainable and kept.frozen == sizes.frozen
    other = replace(spec, options=replace(spec.options, zero=2))
    assert persistent(spec, sizes_of(other)) == Persistent(0, 0, 0)


def test_the_models_own_limit_ends_it() -> None:
    spec = make("llama-3.1-8b", zero=3, gpus=2)
    limited = with_zero(spec, stage3_model_persistence_threshold=10 * 4096 + 1)
    assert persistent(limited, sizes_of(limited)).trained == 10 * 4096


def test_packed_weights_count_as_the_elements_that_hold_them() -> None:
    """Four weights of 4 bits lie in one element of 16: of a matrix of 576 x 192 27,648 of 100,000."""
    spec = make("smollm2-135m", zero=3, gpus=2, lora_rank=16, quantization="nf4")
    keys_and_values = 2 * 30 * 576 * 192
    queries_and_outputs = 2 * 30 * 576 * 576
    found = persistent(spec, sizes_of(spec))
    assert found.packed == (keys_and_values + queries_and_outputs) // 4


def test_what_stays_whole_is_gathered_once() -> None:
    """A model below every limit is whole on each rank, whichever part of it is kept so."""
    for rank in (0, 16):
        spec = make("qwen3-0.6b", zero=3, gpus=2, lora_rank=rank)
        none = with_zero(spec, stage3_param_persistence_threshold=0)
        assert predict(spec).peak_allocated_bytes == predict(none).peak_allocated_bytes
