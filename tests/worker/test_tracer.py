"""Reading the allocator's record and counters as torch hands them over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtop.profiler.probes.allocator import CudaMemoryMeter, read_counters
from llmtop.profiler.probes.tracer import CudaTracer, read_snapshot

DEVICE = torch.device("cuda", 0)


def entry(action: str, addr: int, size: int, time_us: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us}


def snapshot() -> dict[str, Any]:
    block = {"size": 512, "requested_size": 300, "address": 4096, "state": "active_allocated"}
    return {
        "device_traces": [
            [
                entry("segment_alloc", 4096, 2097152, 1),
                entry("alloc", 4096, 300, 2),
                entry("alloc", 8192, 100, 3),
                entry("free_requested", 8192, 100, 5),
                entry("free_completed", 8192, 100, 6),
                # Asked for before the recording.
                entry("free_completed", 9999, 70, 7),
            ],
            [entry("alloc", 1, 1, 1)],
        ],
        "segments": [
            {
                "device": 0,
                "blocks": [
                    block,
                    {**block, "address": 5000, "state": "active_pending_free"},
                    {**block, "address": 9000, "state": "inactive"},
                ],
            },
            {"device": 1, "blocks": [{**block, "address": 5}]},
        ],
    }


def test_allocations_and_frees_of_one_device_are_read() -> None:
    trace = read_snapshot(snapshot(), 0)
    assert trace.addresses == [4096, 8192, 8192, 8192, 9999]
    assert trace.deltas == [300, 100, -100, 0, 0]
    assert trace.active_deltas == [300, 100, 0, -100, -70]
    assert trace.times_us == [2, 3, 5, 6, 7]
    assert (trace.live_at_end, trace.pending_at_end) == ({4096: 300}, {5000: 300})
    assert read_snapshot(snapshot(), 7).deltas == []


class FakeAllocator:
    """Counters and record of `torch.cuda`, as far as the probes use them."""

    def __init__(self) -> None:
        self.allocated, self.peak = 700, 900
        self.allocations, self.frees, self.completed = 40, 30, 28
        self.calls: list[str] = []

    def stats(self, device: int) -> dict[str, Any]:
        self.calls.append("stats")
        size = {"current": self.allocated, "peak": self.peak}
        count = {"current": 10, "peak": 12, "allocated": self.allocations, "freed": self.frees}
        active = {**count, "freed": self.completed}
        names = ("allocated_bytes", "reserved_bytes", "requested_bytes")
        bytes_ = {name: {"all": size} for name in names}
        return {**bytes_, "allocation": {"all": count}, "active": {"all": active}}

    def reset(self, device: int) -> None:
        self.calls.append("reset")
        self.peak = self.allocated

    def record(self, enabled: str | None, **options: Any) -> None:
        self.calls.append(f"record {enabled} {options.get('context')}")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    fake = FakeAllocator()
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", fake.stats, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", fake.reset, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot())
    return fake


def test_counters_are_one_read(allocator: FakeAllocator) -> None:
    counters = read_counters(DEVICE)
    assert (counters.allocated_bytes, counters.requested_peak_bytes, counters.events) == (700, 900, 98)
    assert allocator.calls == ["stats"]


def test_a_step_of_four_phases_reads_the_allocator_five_times(allocator: FakeAllocator) -> None:
    meter = CudaMemoryMeter(DEVICE)
    meter.start_step()
    assert allocator.calls == ["stats", "reset"]
    for _ in range(4):
        meter.stop_phase()
    assert allocator.calls == 5 * ["stats", "reset"]


def test_a_peak_between_two_steps_counts_for_the_run_and_not_for_a_phase(allocator: FakeAllocator) -> None:
    meter = CudaMemoryMeter(DEVICE)
    meter.start_step()
    assert meter.stop_phase().peak_bytes == 700
    assert meter.peaks().allocated_bytes == 900


def test_a_recording_without_stacks_that_is_ended(allocator: FakeAllocator) -> None:
    tracer = CudaTracer(DEVICE)
    tracer.start()
    allocator.allocations, allocator.frees, allocator.completed = 42, 31, 30
    assert tracer.stop().deltas == [300, 100, -100, 0, 0]
    assert [call for call in allocator.calls if call != "stats"] == ["record all None", "record None None"]


def test_lost_events_are_not_passed_over(allocator: FakeAllocator) -> None:
    tracer = CudaTracer(DEVICE)
    tracer.start()
    allocator.allocations += 4
    with pytest.raises(RuntimeError, match="counted 4 events and recorded 5"):
        tracer.stop()
    assert allocator.calls[-1] == "record None None"
