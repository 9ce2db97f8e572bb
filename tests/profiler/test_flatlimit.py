"""bitsandbytes counts in 32 bits: longer flat tensors are refused wherever a run is chosen."""

from __future__ import annotations

import pytest

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import judge
from llmtop.profiler.memory import flatlimit
from llmtop.profiler.memory.predict import predict, predict_with_suggestions
from llmtop.trainer.preflight import preflight
from tests.profiler.test_explain import run_of

TOO_LONG = {"optimizer": "adamw_8bit", "zero": 2}


def three_billion(**options: object) -> RunSpec:
    return run_of("qwen2.5-3b", "h200", **{**TOO_LONG, **options})


def test_what_has_failed_on_the_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="3,085,938,688 elements") as told:
        preflight(three_billion())
    assert "--zero 3" in told.value.fix
    with pytest.raises(UsageError):
        judge(three_billion(zero=1), {})
    assert any("2^31" in words for words in predict(three_billion()).assumptions)


@pytest.mark.parametrize(
    "way", [{"zero": 3}, {"zero": 0}, {"gpus": 2}, {"optimizer": "adamw"}, {"lora_rank": 8}]
)
def test_each_way_out_is_allowed(way: dict[str, object]) -> None:
    flatlimit.check(three_billion(**way))


def test_what_has_run_is_allowed() -> None:
    flatlimit.check(run_of("qwen3-1.7b", "h200", zero=1, optimizer="adamw_8bit"))


def test_no_suggestion_leads_there() -> None:
    suggested = predict_with_suggestions(run_of("qwen2.5-3b", "rtx-4090", zero=2)).suggestions
    assert suggested
    assert not any(one.change == {"optimizer": "adamw_8bit"} for one in suggested)
