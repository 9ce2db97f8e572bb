"""GPM, energy, memory errors, single links: what the driver tells, and nothing where it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.record.deviceevents import LinkSample
from tests.fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, FakeGpu, FakeNvml
from tests.recorded import ManualClock

MIB = 1024**2
BUSY = {2: 91.0, 3: 40.5, 5: 57.0, 10: 38.0, 12: 2.5, 13: 0.0, 20: 10.0, 21: 20.0, 60: 3000.0, 61: 4000.0}


def reader(*gpus: FakeGpu) -> tuple[NvmlReader, FakeNvml, ManualClock]:
    time, nvml = ManualClock(), FakeNvml(*gpus)
    return NvmlReader(nvml, clock=lambda: time.now), nvml, time


def test_activity_is_between_two_samples() -> None:
    gpu = FakeGpu()
    gpu.gpm = dict(BUSY)
    nvml, fake, time = reader(gpu)
    (first,) = nvml.sample()
    assert first.sm_active_percent is None
    time.advance(1.0)
    (second,) = nvml.sample()
    assert (second.sm_active_percent, second.sm_occupancy_percent) == (91.0, 40.5)
    assert (second.tensor_active_percent, second.dram_active_percent) == (57.0, 38.0)
    assert (second.fp32_active_percent, second.fp16_active_percent) == (2.5, 0.0)
    assert second.utilization_percent == 87.0
    gpu.gpm[2] = 12.0
    time.advance(1.0)
    assert nvml.sample()[0].sm_active_percent == 12.0
    nvml.close()
    assert fake.open_handles == []


def test_samples_too_near_to_each_other_repeat_the_activity() -> None:
    gpu = FakeGpu()
    gpu.gpm = dict(BUSY)
    nvml, fake, time = reader(gpu)
    for _ in range(3):
        nvml.sample()
        time.advance(0.5)
    gpu.gpm[2] = 1.0
    time.advance(-0.45)
    assert nvml.sample()[0].sm_active_percent == 91.0
    assert fake.calls.count("nvmlGpmSampleGet") == 3


def test_link_rates_of_gpm_stand_in_where_there_are_no_counters() -> None:
    gpu = FakeGpu()
    gpu.gpm, gpu.fields = dict(BUSY), {197: 0, 198: 0}
    nvml, _, time = reader(gpu)
    nvml.sample()
    time.advance(1.0)
    (sample,) = nvml.sample()
    assert (sample.nvlink_rx_bytes_per_second, sample.nvlink_tx_bytes_per_second) == (3000 * MIB, 4000 * MIB)
    assert sample.pcie_tx_bytes_per_second == 0.0, "the counter's"


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_an_activity_that_is_no_number_is_not_told(value: float) -> None:
    gpu = FakeGpu()
    gpu.gpm = {**BUSY, 2: value}
    del gpu.gpm[5]
    nvml, _, time = reader(gpu)
    nvml.sample()
    time.advance(1.0)
    (sample,) = nvml.sample()
    assert sample.sm_active_percent is None and sample.tensor_active_percent is None
    assert sample.dram_active_percent == 38.0


@pytest.mark.parametrize("function", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet"])
def test_a_refused_activity_leaves_the_utilisation(function: str) -> None:
    gpu = FakeGpu()
    gpu.gpm, gpu.broken = dict(BUSY), {function: NOT_SUPPORTED}
    nvml, fake, time = reader(gpu)
    for _ in range(3):
        (sample,) = nvml.sample()
        time.advance(1.0)
    assert sample.sm_active_percent is None and sample.utilization_percent == 87.0
    nvml.close()
    assert fake.open_handles == []


def test_energy_and_memory_errors() -> None:
    gpu = FakeGpu()
    gpu.energy_mj, gpu.ecc = 1_234_567_890, {0: 12, 1: 1}
    gpu.remapped, gpu.retired, gpu.retirement_pending = (1, 2, 1, 0), {0: 3, 1: 1}, True
    (sample,) = reader(gpu)[0].sample()
    assert sample.energy_joules == pytest.approx(1_234_567.89)
    assert (sample.ecc_corrected, sample.ecc_uncorrected) == (12, 1)
    assert (sample.remapped_rows, sample.remap_pending, sample.remap_failed) == (3, True, False)
    assert (sample.retired_pages, sample.retirement_pending) == (4, True)
    assert (sample.pcie_generation, sample.pcie_width, sample.pcie_replays) == (5, 16, 0)


def test_what_a_device_does_not_have_is_none() -> None:
    (sample,) = reader(FakeGpu())[0].sample()
    for field in ("energy_joules", "ecc_corrected", "remapped_rows", "remap_pending", "retired_pages"):
        assert getattr(sample, field) is None
    assert sample.links == () and sample.nvlinks_active is None and not sample.is_lost


def with_links(gpu: FakeGpu, *states: int) -> FakeGpu:
    gpu.links = list(states)
    for link in range(len(states)):
        gpu.link_fields |= {(138, link): 0, (139, link): 0, (163, link): 0, (161, link): 0, (162, link): 0}
    return gpu


def test_each_link_has_its_rates_and_errors() -> None:
    gpu = with_links(FakeGpu(), 1, 0, 1)
    nvml, _, time = reader(gpu)
    (first,) = nvml.sample()
    assert first.links == (LinkSample(0, None, None, 0, 0, 0), LinkSample(2, None, None, 0, 0, 0))
    gpu.link_fields |= {(138, 0): 2000, (139, 0): 1000, (138, 2): 10, (163, 2): 5, (161, 2): 2, (162, 2): 1}
    time.advance(2.0)
    (second,) = nvml.sample()
    assert second.links == (
        LinkSample(0, 1000 * 1024, 500 * 1024, 0, 0, 0),
        LinkSample(2, 5 * 1024, 0, 5, 2, 1),
    )
    assert second.nvlinks_active == 2
    gpu.links = [0, 0, 0]
    (none,) = nvml.sample()
    assert none.links == () and none.nvlinks_active == 0


def test_a_sum_is_told_where_single_links_are_not() -> None:
    gpu = FakeGpu()
    gpu.links = [1, 1]
    nvml, _, time = reader(gpu)
    nvml.sample()
    time.advance(1.0)
    gpu.fields |= {138: 2048}
    (sample,) = nvml.sample()
    assert sample.nvlink_tx_bytes_per_second == 2048 * 1024
    # The fake, as the driver does, gives a field of link 0 with no scope as that of all.
    assert sample.links[1] == LinkSample(1, None, None, None, None, None)


def test_a_link_that_the_device_lacks_does_not_hide_those_after_it() -> None:
    gpu = with_links(FakeGpu(), 1, 1, 1)
    gpu.missing_links = {1}
    (sample,) = reader(gpu)[0].sample()
    assert [link.link for link in sample.links] == [0, 2]


def test_link_errors_of_older_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = with_links(FakeGpu(), 1)
    for field in (161, 162, 163):
        del gpu.link_fields[field, 0]
    nvml, fake, _ = reader(gpu)
    counters: dict[int, int] = {2: 7, 0: 3, 1: 1}

    def counter(_gpu: Any, _link: int, number: int) -> int:
        return counters[number]

    fake.nvmlDeviceGetNvLinkErrorCounter = counter  # type: ignore[attr-defined]
    assert nvml.sample()[0].links == (LinkSample(0, None, None, 7, 3, 1),)


def test_totals_are_bytes_of_all_links() -> None:
    gpu = FakeGpu()
    gpu.fields = {138: 3, 139: 2, 197: 100, 198: 50}
    nvml, _, _ = reader(gpu)
    totals = nvml.link_totals(0)
    assert (totals.nvlink_tx_bytes, totals.nvlink_rx_bytes) == (3 * 1024, 2 * 1024)
    assert (totals.pcie_tx_bytes, totals.pcie_rx_bytes) == (100, 50)
    gpu.lost = True
    assert nvml.link_totals(0).nvlink_tx_bytes is None


def test_a_lost_device_is_called_lost_and_tells_nothing() -> None:
    gpu = FakeGpu()
    gpu.energy_mj, gpu.gpm = 1000, dict(BUSY)
    nvml, _, time = reader(gpu)
    for _ in range(2):
        nvml.sample()
        time.advance(1.0)
    gpu.lost = True
    for fast in (True, False):
        (sample,) = nvml.sample(fast=fast)
        assert sample.is_lost and sample.energy_joules is None and sample.memory_used_bytes is None
        assert sample.sm_active_percent is None and sample.power_watts is None
    gpu.lost = False
    gpu.broken = {"nvmlDeviceGetMemoryInfo": GPU_IS_LOST}
    assert nvml.sample()[0].is_lost
