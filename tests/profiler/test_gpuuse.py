"""Who uses which GPU, from a driver that is made up."""

from __future__ import annotations

import os

import pytest

from llmtop.profiler.hardware.gpuuse import Process, gpus_in_use, look_up, visible_devices
from tests.fake_nvml import GIB, NOT_SUPPORTED, FakeGpu, FakeNvml, process


def test_each_gpu_with_its_processes() -> None:
    first, second = FakeGpu(uuid="GPU-aaaa"), FakeGpu(uuid="GPU-bbbb")
    first.processes = [process(11, 9 * GIB), process(12, None)]
    known = {11: Process("ada", "python train.py")}
    found = gpus_in_use(FakeNvml(first, second), process_of=lambda pid: known.get(pid, Process()))
    assert [(gpu.index, gpu.preset, gpu.memory_used_bytes) for gpu in found.gpus] == [
        (0, "h200", 10 * GIB),
        (1, "h200", 10 * GIB),
    ]
    assert found.gpus[0].processes is not None and found.gpus[1].processes == ()
    ours, foreign = found.gpus[0].processes
    assert (ours.user, ours.command, ours.memory_bytes) == ("ada", "python train.py", 9 * GIB)
    assert (foreign.pid, foreign.user, foreign.memory_bytes) == (12, None, None)
    assert visible_devices(found.gpus) == "GPU-aaaa,GPU-bbbb"


def test_what_the_driver_does_not_tell_is_none() -> None:
    gpu = FakeGpu()
    gpu.broken = {"nvmlDeviceGetComputeRunningProcesses": NOT_SUPPORTED}
    (found,) = gpus_in_use(FakeNvml(gpu)).gpus
    assert found.processes is None


def test_without_a_driver_the_reason_is_told() -> None:
    found = gpus_in_use(FakeNvml(init_error=12))
    assert found.gpus == () and "NVML" in found.problem


def test_what_is_hidden_from_cuda_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb")
    found = gpus_in_use(FakeNvml(FakeGpu(uuid="GPU-aaaa"), FakeGpu(uuid="GPU-bbbb")))
    assert [gpu.visible for gpu in found.gpus] == [False, True]


def test_a_process_of_this_machine_is_looked_up() -> None:
    own = look_up(os.getpid())
    assert own.user is not None and own.command is not None and "/" not in own.command.split()[0]
    assert look_up(2**22 + 1) == Process()
