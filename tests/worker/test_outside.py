"""Readings of the device at known moments, against a fake driver."""

from __future__ import annotations

import os

import pytest

from llmtop.profiler.probes.outside import OutsideProbe
from llmtop.profiler.record.events import OutsideMeasured
from tests.fake_nvml import GIB, FakeGpu, FakeNvml, process


@pytest.fixture(autouse=True)
def every_device_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def measured(nvml: FakeNvml) -> OutsideMeasured:
    seen: list[OutsideMeasured] = []
    OutsideProbe(0, seen.append, nvml).measure("context")
    assert len(seen) == 1
    return seen[0]


def test_the_device_and_this_process_are_read() -> None:
    gpu = FakeGpu()
    gpu.used = 9 * GIB
    gpu.processes = [process(os.getpid() + 1, 5 * GIB), process(os.getpid(), 3 * GIB)]
    assert measured(FakeNvml(gpu)) == OutsideMeasured(
        moment="context", device_used_bytes=9 * GIB, process_used_bytes=3 * GIB, reserved_bytes=0
    )


@pytest.mark.parametrize("processes", [[], [process(os.getpid(), None)], [process(os.getpid() + 1, GIB)]])
def test_a_process_that_the_driver_does_not_tell_is_unknown(processes: list[object]) -> None:
    gpu = FakeGpu()
    gpu.processes = processes
    seen = measured(FakeNvml(gpu))
    assert (seen.device_used_bytes, seen.process_used_bytes) == (gpu.used, None)


def test_a_list_of_processes_that_is_refused_leaves_the_device() -> None:
    gpu = FakeGpu()
    gpu.broken["nvmlDeviceGetComputeRunningProcesses"] = 3
    assert measured(FakeNvml(gpu)).process_used_bytes is None
    assert measured(FakeNvml(gpu)).device_used_bytes == gpu.used


def test_without_a_driver_nothing_is_known() -> None:
    seen = measured(FakeNvml(init_error=12))
    assert (seen.device_used_bytes, seen.process_used_bytes) == (None, None)


def test_the_visible_device_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    first, second = FakeGpu(), FakeGpu()
    second.used = 77 * GIB
    assert measured(FakeNvml(first, second)).device_used_bytes == 77 * GIB


def test_a_device_is_found_by_the_beginning_of_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    first, second = FakeGpu(uuid="GPU-aaaa"), FakeGpu(uuid="GPU-bbbb")
    second.used = 77 * GIB
    assert measured(FakeNvml(first, second)).device_used_bytes == 77 * GIB


def test_a_rank_without_a_device_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    seen = measured(FakeNvml(FakeGpu()))
    assert (seen.device_used_bytes, seen.process_used_bytes) == (None, None)


def test_a_process_that_uses_less_than_the_allocator_holds_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 4 * GIB)
    gpu = FakeGpu()
    gpu.processes = [process(os.getpid(), 3 * GIB)]
    seen = measured(FakeNvml(gpu))
    assert (seen.process_used_bytes, seen.reserved_bytes) == (None, 4 * GIB)
