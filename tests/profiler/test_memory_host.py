"""Host memory under offload, term by term."""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.host import RANK_PROCESS_BYTES, host_bytes, pinned_block
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.sizes import sizes_of

OFFLOADED = {"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}


def make(**options: Any) -> RunSpec:
    values = {"model": "smollm2-360m", "gpu": "h200", **options}
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=values)
    host = Machine(gpu="h200", gpus=options.get("gpus", 1), host_memory_bytes=None)
    return resolve([layer], name="test", machine=host)


def of(**options: Any) -> dict[str, int]:
    spec = make(**options)
    return host_bytes(spec, sizes_of(spec)).components


def test_a_pinned_block_is_a_power_of_two() -> None:
    assert [pinned_block(size) for size in (0, 1, 2, 3, 2**20, 2**20 + 1)] == [0, 1, 2, 4, 2**20, 2**21]


@pytest.mark.parametrize(
    ("options", "peak_rss_bytes"),
    [
        ({"model": "llama-3.2-1b", "offload_optimizer": "cpu"}, 33_771_155_456),
        ({"model": "qwen3-1.7b", "zero": 3, "offload_optimizer": "cpu", "grad_accum": 2}, 37_469_409_280),
        ({"model": "smollm2-360m", **OFFLOADED}, 11_815_690_240),
        ({"model": "qwen2.5-0.5b", **OFFLOADED, "grad_accum": 2}, 14_485_438_464),
        ({"model": "smollm2-135m", **OFFLOADED, "optimizer": "adamw_torch"}, 7_246_200_832),
    ],
)
def test_what_a_rank_held_on_an_h200(options: dict[str, Any], peak_rss_bytes: int) -> None:
    assert predict(make(**options)).host_bytes == pytest.approx(peak_rss_bytes, rel=0.01)


def test_shards_stay_pinned_one_by_one_beside_the_flat_ones() -> None:
    """The head too, though it is tied: stage 3 makes it before it is thrown away."""
    one, both = of(zero=3, offload_optimizer="cpu"), of(**OFFLOADED)
    weights = 361_821_120
    more = both["pinned"] - one["pinned"] - pinned_block(2 * weights)
    assert 2 * weights < more < 4 * weights


def test_torchs_adamw_has_two_temporaries_on_the_host() -> None:
    ours, torchs = (
        of(zero=2, offload_optimizer="cpu"),
        of(zero=2, offload_optimizer="cpu", optimizer="adamw_torch"),
    )
    assert torchs["pageable"] - ours["pageable"] == 8 * 361_821_120


def test_shards_of_stage_3_pass_through_the_host_at_start() -> None:
    """4.69 GB were held by a run of qwen3-1.7b without offload, 1.95 GB at stage 2."""
    assert "start" not in of(model="qwen3-1.7b", zero=2)
    held = of(model="qwen3-1.7b", zero=3)
    assert sum(held.values()) == pytest.approx(4_690_000_000, rel=0.01)
    assert of(model="qwen3-1.7b", zero=3, gpus=8)["processes"] > 8 * RANK_PROCESS_BYTES
