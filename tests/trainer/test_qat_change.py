"""What a live run with fake quantization can change, and what it cannot."""

from __future__ import annotations

import pytest

from llmtop.presets.errors import UsageError
from llmtop.profiler.memory.predict import predict
from llmtop.trainer.change.plan import plan_change
from tests.worker.launching import tiny_spec


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("zero=3", "sharding saves nothing"),
        ("qat=none", "made for it"),
        ("qat_group=16", "made for it"),
        ("quantization=nf4", "quantization = nf4 with lora_rank = 0"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(word: str, told: str) -> None:
    spec = tiny_spec(qat="int8-int4")
    with pytest.raises(UsageError) as caught:
        plan_change(spec, predict(spec), [word])
    assert told in f"{caught.value}"


def test_what_can_be_is_predicted_with_the_copies() -> None:
    spec = tiny_spec(qat="int8-int4")
    hot = plan_change(spec, predict(spec), ["gradient_checkpointing=yes"])
    assert not hot.restage
    assert hot.new_prediction.peak_allocated_bytes <= hot.old_prediction.peak_allocated_bytes
    assert plan_change(spec, predict(spec), ["zero=1"]).restage
