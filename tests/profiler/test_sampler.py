"""A sample holds devices, host and ranks, reads what is slow less often, and outlives what vanishes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

from llmtop.profiler.hardware.host import HostReader
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.hardware.others import OthersCounter
from llmtop.profiler.hardware.processes import Running
from llmtop.profiler.hardware.sampler import Sampler
from llmtop.profiler.record.deviceevents import OtherWork
from tests.fake_nvml import GIB, FakeGpu, FakeNvml, process
from tests.recorded import ManualClock


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def new_sampler(*gpus: FakeGpu, slow_every: int = 3) -> tuple[Sampler, FakeNvml, ManualClock]:
    nvml, time = FakeNvml(*gpus), ManualClock()
    sampler = Sampler(
        nvml=NvmlReader(nvml, clock=lambda: time.now),
        host=HostReader(clock=lambda: time.now),
        device_indices=tuple(range(len(gpus))),
        slow_every=slow_every,
        clock=lambda: time.now,
    )
    return sampler, nvml, time


def test_a_sample_of_a_run_on_this_machine() -> None:
    sampler, _, time = new_sampler()
    first = sampler.sample({0: os.getpid()})
    time.advance(1.0)
    second = sampler.sample({0: os.getpid()})
    assert first.devices == ()
    assert first.host.memory_total_bytes == second.host.memory_total_bytes
    (rank,) = second.processes
    assert rank.rank == 0 and rank.rss_bytes is not None and rank.rss_bytes > 0
    assert first.processes[0].cpu_percent is None
    assert rank.cpu_percent is not None and rank.cpu_percent >= 0


def test_how_long_logs_are_is_told_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("twelve bytes")
    (tmp_path / "supervisor.log").write_text("four")
    sampler = Sampler(
        nvml=NvmlReader(FakeNvml()), device_indices=(), log_path=lambda source: tmp_path / f"{source}.log"
    )
    sample = sampler.sample({0: os.getpid(), 1: os.getpid()})
    assert [rank.log_bytes for rank in sample.processes] == [12, None]
    assert sample.host.log_bytes == 4


def test_slow_readings_are_repeated_in_between() -> None:
    gpu = FakeGpu()
    gpu.processes = [process(os.getpid(), 5 * GIB)]
    sampler, nvml, time = new_sampler(gpu, slow_every=3)
    pss: list[int | None] = []
    for _ in range(6):
        sample = sampler.sample({0: os.getpid()})
        assert sample.devices[0].own_memory_bytes == 5 * GIB
        assert sample.devices[0].process_count == 1
        pss.append(sample.processes[0].pss_bytes)
        time.advance(1.0)
    assert nvml.calls.count("nvmlDeviceGetComputeRunningProcesses") == 2
    assert nvml.calls.count("nvmlDeviceGetPowerUsage") == 6
    assert len(set(pss[:3])) == 1


def test_a_rank_that_dies_and_one_that_comes_back() -> None:
    sampler, _, _ = new_sampler(slow_every=100)
    first, second = sleeper(), sleeper()
    try:
        sample = sampler.sample({0: first.pid, 1: second.pid})
        assert [p.rank for p in sample.processes if p.rss_bytes] == [0, 1]
        second.kill()
        second.communicate()
        sample = sampler.sample({0: first.pid, 1: second.pid})
        assert sample.processes[1].rank == 1 and sample.processes[1].rss_bytes is None
        assert sample.processes[0].rss_bytes
        second = sleeper()
        sample = sampler.sample({0: first.pid, 1: second.pid})
        assert sample.processes[1].rss_bytes
    finally:
        for child in (first, second):
            child.kill()
            child.communicate()
    assert sampler.sample({}).processes == ()


def test_all_that_this_process_started_is_the_runs_own_and_no_other_work() -> None:
    """Ranks that stand by for a relaunch are not among those that are sampled."""
    gpu = FakeGpu()
    sampler, _, _ = new_sampler(gpu, slow_every=1)
    rank, standby = sleeper(), sleeper()
    gpu.processes = [process(rank.pid, 5 * GIB), process(standby.pid, GIB)]
    told: list[frozenset[int]] = []

    class Others(OthersCounter):
        def advance(
            self, running: dict[int, Running], own: Container[int], now: float
        ) -> tuple[OtherWork, ...]:
            told.append(frozenset(pid for pid in running if pid in own))
            return super().advance(running, own, now)

    sampler._others = Others()
    try:
        (device,) = sampler.sample({0: rank.pid}).devices
    finally:
        for child in (rank, standby):
            child.kill()
            child.communicate()
    assert {os.getpid(), rank.pid, standby.pid} <= told[0] and os.getppid() not in told[0]
    assert device.own_memory_bytes == 6 * GIB


def test_a_gpu_lost_while_sampling() -> None:
    gpu = FakeGpu()
    sampler, _, _ = new_sampler(gpu, slow_every=2)
    for _ in range(2):
        assert sampler.sample({}).devices[0].memory_used_bytes == 10 * GIB
    gpu.lost = True
    for _ in range(3):
        (device,) = sampler.sample({}).devices
        assert device.index == 0 and device.memory_used_bytes is None
    sampler.close()


def test_the_devices_that_cuda_shows_are_the_default() -> None:
    nvml = NvmlReader(FakeNvml(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")))
    assert len(Sampler(nvml=nvml).sample({}).devices) == len(nvml.visible_indices())
