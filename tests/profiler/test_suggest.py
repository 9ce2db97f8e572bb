"""Suggestions: what uses the room comes by speed and is faster; what makes a run fit, by cost."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.predict import predict, predict_with_suggestions
from llmtop.profiler.memory.result import Prediction, Suggestion
from llmtop.profiler.memory.suggest import apply
from tests.profiler.test_explain import run_of, runs


def rates(suggestions: tuple[Suggestion, ...]) -> list[float]:
    return [one.tokens_per_second or 0.0 for one in suggestions]


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
    """Its allocated peak lies below the limit where the run does not fit."""
    spec = run_of("llama-3.1-8b", "rtx-4090")
    found = predict_with_suggestions(spec).suggestions
    offloaded = next(s for s in found if s.change.keys() >= {"offload_param"} and not s.fits)
    memory = spec.gpu.memory_bytes
    assert memory is not None and offloaded.peak_allocated_bytes < memory < (offloaded.needed_bytes or 0)
    for suggestion in found:
        then = predict(apply(spec, suggestion.change))
        assert suggestion.needed_bytes == then.needed_bytes
        moved = "offload_optimizer" in suggestion.change
        assert suggestion.host_bytes == (then.host_bytes if moved else None)
        assert ("host memory" in suggestion.words) == moved and "host memory" not in suggestion.text


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
    memory = 24 << 30
    for micro, accumulated in ((5, 1), (6, 1), (7, 2), (8, 3)):
        spec = run_of("llama-3.2-1b", "h200", micro_batch=micro, grad_accum=accumulated, seq_len=8192)
        small = replace(spec, gpu=replace(spec.gpu, memory_bytes=memory))
        found = predict_with_suggestions(small).suggestions
        smaller = [s.change for s in found if "micro_batch" in s.change]
        assert smaller
        for change in smaller:
            assert change["micro_batch"] * change["grad_accum"] == micro * accumulated  # type: ignore[operator]
