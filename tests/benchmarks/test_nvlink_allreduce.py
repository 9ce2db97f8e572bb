"""The check of NVLink's counters: its arithmetic, its waiting, its verdict; and its ranks, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import nvlink_allreduce as bench
from benchmarks.nvlink_allreduce import Ranks, compare, measure, settled, told
from benchmarks.zero3_traffic import ring_bytes
from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.hardware.links import LinkTotals
from llmtop.profiler.hardware.nvml import NvmlReader
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.recorded import ManualClock

MIB = 1024**2


def totals(tx: int | None, rx: int | None) -> LinkTotals:
    return LinkTotals(nvlink_tx_bytes=tx, nvlink_rx_bytes=rx)


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_gather", 2, 0.5),
        ("reduce_scatter", 2, 0.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
    ],
)
def test_bytes_of_a_ring(collective: Any, ranks: int, factor: float) -> None:
    assert ring_bytes(collective, 256 * MIB, ranks) == factor * 256 * MIB


@given(st.integers(2, 72), st.integers(1, 1 << 40))
def test_an_all_reduce_is_a_scatter_and_a_gather(ranks: int, size: int) -> None:
    both = ring_bytes("reduce_scatter", size, ranks) + ring_bytes("all_gather", size, ranks)
    assert abs(ring_bytes("all_reduce", size, ranks) - both) <= 1
    assert ring_bytes("all_gather", size, ranks) < size


def test_totals_are_taken_when_they_stand_still() -> None:
    time, readings = ManualClock(), [0, 5, 5, 9]

    def read() -> Sequence[LinkTotals]:
        return (totals(readings.pop(0) if len(readings) > 1 else readings[0], 0),)

    assert settled(read, clock=lambda: time.now, pause=time.advance) == (totals(9, 0),)


def test_totals_that_never_stand_still() -> None:
    time, count = ManualClock(), iter(range(100_000))
    with pytest.raises(UsageError, match="still move"):
        settled(lambda: (totals(next(count), 0),), clock=lambda: time.now, pause=time.advance)


def test_both_ways_of_every_device() -> None:
    before, after = (totals(100, 200), totals(0, 0)), (totals(1100, 1200), totals(990, 1000))
    found = compare(1000, (2, 3), before, after)
    assert [(d.device, d.way, d.ratio) for d in found] == [
        (2, "send", 1.0),
        (2, "receive", 1.0),
        (3, "send", 0.99),
        (3, "receive", 1.0),
    ]
    with pytest.raises(UsageError, match="no NVLink totals of GPU 0"):
        compare(1000, (0,), (totals(None, 1),), (totals(1, 1),))


class FakeRanks:
    """Moves what a ring would, times a factor, over links that count in KiB."""

    versions = {"torch": "x", "nccl": "y"}

    def __init__(self, gpus: Sequence[FakeGpu], factor: float = 1.0) -> None:
        self.gpus, self.factor = gpus, factor

    def run(self, collective: Any, tensor_bytes: int, repeats: int) -> float:
        moved = round(self.factor * repeats * ring_bytes(collective, tensor_bytes, len(self.gpus))) // 1024
        for gpu in self.gpus:
            gpu.fields[138] += moved
            gpu.fields[139] += moved
        return 0.5


@pytest.mark.parametrize(("factor", "good"), [(1.0, True), (1.015, True), (0.97, False), (18.0, False)])
def test_the_verdict(factor: float, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUIET_SECONDS", 0.0)
    gpus = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]
    reader = NvmlReader(FakeNvml(*gpus))
    results = list(measure(reader, (0, 1), FakeRanks(gpus, factor), [64 * MIB], 10))  # type: ignore[arg-type]
    assert [result.collective for result in results] == ["all_reduce", "all_gather", "reduce_scatter"]
    assert all(result.within_tolerance is good for result in results)
    assert all(len(result.directions) == 4 for result in results)
    row = told(results[0])
    assert ("ok" in row) is good and "64 MiB" in row and f"{factor:.4f}" in row


def test_results_are_json_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]

    class Opened(FakeRanks):
        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_error: object) -> None:
            return None

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in bench.NCCL | {"CUDA_DEVICE_ORDER": ""}:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(bench, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(bench, "NvmlReader", lambda: NvmlReader(FakeNvml(*gpus)))
    monkeypatch.setattr(bench, "Ranks", lambda ranks: Opened(gpus))
    out = tmp_path / "links.jsonl"
    for _ in range(2):
        assert bench.main(["--mebibytes", "1", "2", "--out", str(out)]) == ExitCode.DONE
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 12
    assert rows[0]["ratios"] == [1.0] * 4 and rows[0]["directions"][0]["expected_bytes"] == 20 * MIB
    assert rows[0]["nccl"]["NCCL_ALGO"] == "Ring"


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(bench, "NvmlReader", lambda: NvmlReader(FakeNvml(FakeGpu())))
    assert bench.main([]) == ExitCode.USAGE
    assert "needs 2 GPUs, and 1 are here" in capsys.readouterr().err
    bare = [FakeGpu(uuid=f"GPU-{n}") for n in range(2)]
    for gpu in bare:
        gpu.fields = {}
    monkeypatch.setattr(bench, "NvmlReader", lambda: NvmlReader(FakeNvml(*bare)))
    assert bench.main([]) == ExitCode.USAGE
    assert "no NVLink totals of GPU 0" in capsys.readouterr().err


@pytest.mark.slow
def test_real_ranks_on_the_cpu() -> None:
    with Ranks(2, backend="gloo") as ranks:
        assert ranks.versions["nccl"] == "none"
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            assert ranks.run(collective, MIB, 2) > 0
    assert not any(process.is_alive() for process in ranks._processes)
