"""The readings of real GPUs: every field is a value of sane size, or None because the driver refuses it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.tui.doctor.gpus import look_at_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]

PERCENT = (0.0, 100.5)
RATE = (0.0, 2e12)
COUNT = (0, 1 << 48)
RANGES: dict[str, tuple[float, float]] = {
    "memory_used_bytes": (1, 1 << 42),
    "memory_total_bytes": (1 << 30, 1 << 42),
    "utilization_percent": PERCENT,
    "power_watts": (1, 3000),
    "power_limit_watts": (10, 3000),
    "temperature_celsius": (1, 130),
    "sm_clock_hz": (50e6, 6e9),
    "memory_clock_hz": (50e6, 30e9),
    "nvlink_tx_bytes_per_second": RATE,
    "nvlink_rx_bytes_per_second": RATE,
    "pcie_tx_bytes_per_second": RATE,
    "pcie_rx_bytes_per_second": RATE,
    "sm_active_percent": PERCENT,
    "sm_occupancy_percent": PERCENT,
    "tensor_active_percent": PERCENT,
    "dram_active_percent": PERCENT,
    "fp32_active_percent": PERCENT,
    "fp16_active_percent": PERCENT,
    "energy_joules": (0, 1e13),
    "ecc_corrected": COUNT,
    "ecc_uncorrected": COUNT,
    "remapped_rows": COUNT,
    "retired_pages": COUNT,
    "pcie_generation": (1, 8),
    "pcie_width": (1, 32),
    "pcie_replays": COUNT,
    "nvlinks_active": (0, 36),
}
KNOWN_EVERYWHERE = ("memory_used_bytes", "memory_total_bytes", "power_watts", "utilization_percent")


@pytest.fixture
def reader() -> Iterator[NvmlReader]:
    opened = NvmlReader()
    yield opened
    opened.close()


def samples(reader: NvmlReader, rounds: int = 4) -> tuple[DeviceSample, ...]:
    """The last of several; GPM wants a tenth of a second between two, which is no waiting for a result."""
    taken: tuple[DeviceSample, ...] = ()
    for _ in range(rounds):
        taken = reader.sample(own_pids=())
        time.sleep(0.15)
    return taken


def test_every_field_is_sane_or_not_told(reader: NvmlReader) -> None:
    assert reader.problem is None
    for sample in samples(reader):
        assert not sample.is_lost and sample.name
        for field, (low, high) in RANGES.items():
            value = getattr(sample, field)
            assert value is None or low <= value <= high, (field, value)
        assert all(getattr(sample, field) is not None for field in KNOWN_EVERYWHERE)
        for link in sample.links:
            rates = (link.tx_bytes_per_second, link.rx_bytes_per_second)
            assert all(rate is None or 0 <= rate <= 2e11 for rate in rates)


def test_hopper_measures_its_activity(reader: NvmlReader) -> None:
    for device, sample in zip(reader.devices, samples(reader), strict=True):
        if device.compute_capability is None or float(device.compute_capability) < 9.0:
            pytest.skip(f"GPU {device.index} is older than Hopper")
        for field in ("sm_active_percent", "sm_occupancy_percent", "tensor_active_percent"):
            assert getattr(sample, field) is not None, field
        assert sample.dram_active_percent is not None and sample.energy_joules is not None


def test_energy_only_grows(reader: NvmlReader) -> None:
    before, after = samples(reader), samples(reader, 8)
    for first, second in zip(before, after, strict=True):
        if first.energy_joules is not None:
            assert second.energy_joules is not None and second.energy_joules >= first.energy_joules


def test_dear_readings_are_on_the_slow_clock(
    reader: NvmlReader, record_property: Callable[[str, object], None]
) -> None:
    samples(reader, 6)
    for row in reader.call_costs():
        assert row.seconds is not None
        # What is slow without being dear is so by its nature.
        assert row.is_slow or row.seconds <= 1e-3
        record_property(f"{row.call} on GPU {row.device}", f"{1e6 * row.seconds:.0f} us")
    began = time.perf_counter()
    reader.sample(fast=True)
    record_property("fast sample of all devices", f"{1e3 * (time.perf_counter() - began):.2f} ms")


def test_topology_has_every_device_and_pair(reader: NvmlReader) -> None:
    topology = reader.topology()
    count = len(reader.devices)
    assert len(topology.devices) == count and len(topology.pairs) == count * (count - 1) // 2
    for device in topology.devices:
        assert device.pci_bus_id and device.pcie_generation_max
        assert device.nvlinks is None or 0 <= device.nvlinks <= 36


def test_what_was_opened_can_be_closed_and_opened_again() -> None:
    for _ in range(3):
        reader = NvmlReader()
        reader.watch_xids()
        samples(reader, 2)
        assert reader.take_xids(poll=True) == ()
        reader.close()


def test_doctor_looks_at_them() -> None:
    found = look_at_gpus()
    assert {"gpu links", "gpu memory", "gpu activity", "gpu errors", "gpu readings"} <= {
        check.name for check in found.checks
    }
