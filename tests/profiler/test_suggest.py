"""Suggestions come by speed: what uses the room, and what makes a run fit, other trainings last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.changes import apply, slower_changes
from llmtop.profiler.memory.predict import predict, predict_with_suggestions
from llmtop.profiler.memory.result import Prediction, Suggestion
from llmtop.profiler.memory.suggest import suggestions
from llmtop.profiler.memory.waysout import CANDIDATES
from tests.profiler.test_explain import run_of, runs

OTHER_TRAINING = {"lora_rank", "quantization", "seq_len"}
CHECKPOINTING = {"gradient_checkpointing", "checkpointing_every"}
_TOO_LARGE = (run_of("llama-3.1-8b", "rtx-4090"), run_of("llama-3.1-8b", "rtx-4090", seq_len=131072))


def rates(found: tuple[Suggestion, ...]) -> list[float]:
    return [one.tokens_per_second or 0.0 for one in found]


def suggested(model: str = "llama-3.2-1b", gpu: str = "h200", **options: Any) -> Prediction:
    return predict_with_suggestions(run_of(model, gpu, **options))


@settings(max_examples=80, deadline=None)
@given(runs())
def test_the_room_is_used_by_what_gains_most(spec: RunSpec) -> None:
    prediction = predict_with_suggestions(spec)
    if not prediction.fits or prediction.tokens_per_second is None:
        return
    found = rates(prediction.suggestions)
    assert found == sorted(found, reverse=True)
    for suggestion in prediction.suggestions:
        assert suggestion.fits and (suggestion.tokens_per_second or 0) > prediction.tokens_per_second
        assert predict(apply(spec, suggestion.change)).tokens_per_second == suggestion.tokens_per_second


def test_a_run_with_room_is_told_of_every_way_to_use_it() -> None:
    gathered = suggested(zero=3, gpus=8)
    assert any(s.change == {"zero": 2} for s in gathered.suggestions)
    again = suggested(zero=2, gpus=8, micro_batch=4, gradient_checkpointing=True)
    keys = {key for s in again.suggestions for key in s.change}
    assert {"gradient_checkpointing", "micro_batch"} <= keys
    packed = suggested("llama-3.1-8b", quantization="nf4", lora_rank=16)
    assert any(s.change == {"quantization": "none"} for s in packed.suggestions)
    away = suggested(zero=3, gpus=2, offload_param="cpu", offload_optimizer="cpu")
    assert any(s.change.get("offload_param") == "none" for s in away.suggestions)


def test_a_change_has_the_figure_of_its_verdict_and_the_host_memory_that_it_takes() -> None:
    found = [(run, s) for run in _TOO_LARGE for s in predict_with_suggestions(run).suggestions]
    assert {s.fits for _, s in found} == {True, False}
    for spec, suggestion in found:
        then = predict(apply(spec, suggestion.change))
        assert suggestion.needed_bytes == then.needed_bytes
        moved = "offload_optimizer" in suggestion.change
        assert suggestion.host_bytes == (then.host_bytes if moved else None)
        assert ("host memory" in suggestion.words) == moved and "host memory" not in suggestion.text


@pytest.mark.parametrize(
    ("spec", "ways"),
    [
        (run_of("llama-3.1-8b", "a100-80gb", gpus=2, zero=2), ({"zero", "liger"}, {"zero", *CHECKPOINTING})),
        (run_of("qwen2.5-7b", "a100-40gb", gpus=4, zero=2), ({"zero", *CHECKPOINTING},)),
        (run_of("llama-3.1-8b", "rtx-4090", zero=2, lora_rank=16), (CHECKPOINTING,)),
    ],
)
def test_what_fits_together_is_found_and_told_first(spec: RunSpec, ways: tuple[set[str], ...]) -> None:
    """Only an optimizer on the CPU, six times slower, and other trainings were."""
    found = predict_with_suggestions(spec).suggestions
    kinds = [set(one.change) for one in found]
    assert all(way in kinds for way in ways) and all(one.fits for one in found)
    same = [one for one in found if OTHER_TRAINING.isdisjoint(one.change)]
    assert same == list(found[: len(same)]) and rates(tuple(same)) == sorted(rates(tuple(same)), reverse=True)
    assert len(found) <= 5


@settings(max_examples=60, deadline=None)
@given(runs(), st.floats(0.1, 0.95))
def test_no_way_has_a_part_that_it_fits_without(spec: RunSpec, share: float) -> None:
    needed = predict(spec).needed_bytes
    if needed is None or spec.on_cpu:
        return
    small = replace(spec, gpu=replace(spec.gpu, memory_bytes=int(needed * share)))
    asked = 0

    def counted(changed: RunSpec) -> Prediction:
        nonlocal asked
        asked += 1
        return predict(changed)

    for suggestion in suggestions(small, predict(small), counted):
        if not suggestion.fits or OTHER_TRAINING & suggestion.change.keys():
            continue
        then = apply(small, suggestion.change)
        now, new = small.options, then.options
        assert new.micro_batch * new.grad_accum == now.micro_batch * now.grad_accum
        for part in (
            {"liger": now.liger},
            {
                "gradient_checkpointing": now.gradient_checkpointing,
                "checkpointing_every": now.checkpointing_every,
            },
            {"micro_batch": now.micro_batch, "grad_accum": now.grad_accum},
        ):
            without = apply(then, part)
            if part.keys() <= suggestion.change.keys() and not refusals(without):
                assert not predict(without).fits
    assert asked < 2 * CANDIDATES


def test_what_fits_alone_comes_by_its_cost_for_a_token() -> None:
    spec = run_of("llama-3.2-1b", "h200", micro_batch=8, seq_len=4096)
    needed = predict(spec).needed_bytes
    assert needed is not None
    small = replace(spec, gpu=replace(spec.gpu, memory_bytes=int(needed * 0.8)))
    found = predict_with_suggestions(small).suggestions
    same = [s for s in found if s.fits and not s.change.keys() & {"lora_rank", "quantization", "seq_len"}]
    assert len(same) > 1 and rates(tuple(same)) == sorted(rates(tuple(same)), reverse=True)


def test_a_smaller_micro_batch_trains_on_as_many_sequences() -> None:
    """5 sequences have no half: five micro-batches of one do, two of two do not."""
    for micro, accumulated in ((5, 1), (6, 1), (7, 2), (8, 3)):
        spec = run_of("llama-3.2-1b", "h200", micro_batch=micro, grad_accum=accumulated, seq_len=8192)
        smaller = [step.change for step in slower_changes(spec) if "micro_batch" in step.change]
        assert smaller
        for change in smaller:
            assert change["micro_batch"] * change["grad_accum"] == micro * accumulated
