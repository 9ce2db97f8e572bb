"""Switches the CUDA allocator's own record of allocations and frees on for a step, and reads it."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch.cuda import memory as cuda_memory

from llmtop.profiler.probes.allocator import AllocatorCounters, read_counters
from llmtop.profiler.probes.peaktrace import Trace

_MOST_EVENTS = 4_000_000
_NOT_NEEDED = ["segment_alloc", "segment_free", "oom", "snapshot"]
_SIGNS = {"alloc": (1, 1), "free_requested": (-1, 0), "free_completed": (0, -1)}
"""What an event adds to what is allocated, and to what is active: torch `c10/cuda/CUDACachingAllocator.cpp`
takes a block from the former in `free` and from the latter in `free_block`, each next to its trace entry."""


class Tracer(Protocol):
    """One device's allocator, recorded on request."""

    def start(self) -> None: ...

    def counters(self) -> AllocatorCounters: ...

    def stop(self) -> Trace:
        """End the recording and hand it over."""
        ...

    def abandon(self) -> None:
        """End the recording, whatever state it is in."""
        ...


class CudaTracer:
    """Without stacks an event costs some 200 bytes of host memory and no time to speak of."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._first_event = 0

    def start(self) -> None:
        options: dict[str, Any] = {"context": None, "stacks": "python", "max_entries": _MOST_EVENTS}
        known = inspect.signature(cuda_memory._record_memory_history).parameters
        if "clear_history" in known:
            options["clear_history"] = True
        if "skip_actions" in known:
            options["skip_actions"] = _NOT_NEEDED
        cuda_memory._record_memory_history("all", **options)
        self._first_event = self.counters().events

    def counters(self) -> AllocatorCounters:
        return read_counters(self._device)

    def stop(self) -> Trace:
        events = self.counters().events - self._first_event
        snapshot = cuda_memory._snapshot()
        self.abandon()
        trace = read_snapshot(snapshot, self._index)
        if len(trace.deltas) != events:
            raise RuntimeError(f"the allocator counted {events} events and recorded {len(trace.deltas)}")
        return trace

    def abandon(self) -> None:
        cuda_memory._record_memory_history(None)


def read_snapshot(snapshot: dict[str, Any], device_index: int) -> Trace:
    """The allocations and frees of one device in what `torch.cuda.memory._snapshot` returns."""
    traces = snapshot["device_traces"]
    entries = traces[device_index] if device_index < len(traces) else []
    kept = [entry for entry in entries if entry["action"] in _SIGNS]
    return Trace(
        addresses=[entry["addr"] for entry in kept],
        deltas=[_SIGNS[entry["action"]][0] * entry["size"] for entry in kept],
        active_deltas=[_SIGNS[entry["action"]][1] * entry["size"] for entry in kept],
        times_us=[entry["time_us"] for entry in kept],
        live_at_end=_blocks(snapshot, device_index, "active_allocated"),
        pending_at_end=_blocks(snapshot, device_index, "active_pending_free"),
    )


def _blocks(snapshot: dict[str, Any], device_index: int, state: str) -> dict[int, int]:
    return {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        if segment["device"] == device_index
        for block in segment["blocks"]
        if block["state"] == state
    }
