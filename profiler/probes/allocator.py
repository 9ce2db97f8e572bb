"""Memory at the borders of a step's phases, and the peaks between them."""

from __future__ import annotations

from typing import Protocol

import torch
from msgspec import Struct

from llmtop.profiler.probes.resident import (
    peak_rss_bytes,
    reset_peak_rss,
    rss_after_reset_bytes,
    rss_bytes,
)
from llmtop.profiler.record.events import PhaseMemory


class Peaks(Struct, frozen=True, kw_only=True):
    """Largest values of the whole run so far."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None


class MemoryMeter(Protocol):
    def start_step(self) -> PhaseMemory:
        """Peaks since the last reading: of the steps that were not read, if there were any."""
        ...

    def stop_phase(self) -> PhaseMemory: ...

    def total_bytes(self) -> int | None:
        """Held now: allocated on CUDA, resident on the CPU."""
        ...

    def peaks(self) -> Peaks: ...


def memory_meter(device: torch.device) -> MemoryMeter:
    return CudaMemoryMeter(device) if device.type == "cuda" else ResidentMeter()


def merge(first: PhaseMemory | None, second: PhaseMemory) -> PhaseMemory:
    """A phase that runs once per micro-batch: the latest end, the largest peak."""
    if first is None:
        return second
    return PhaseMemory(
        allocated_bytes=second.allocated_bytes,
        peak_bytes=largest(first.peak_bytes, second.peak_bytes),
        reserved_bytes=largest(first.reserved_bytes, second.reserved_bytes),
    )


def largest(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


class AllocatorCounters(Struct, frozen=True, kw_only=True):
    """The caching allocator's counters at one time. Peaks are since the last reset."""

    allocated_bytes: int
    allocated_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    requested_bytes: int
    """What was asked for of active blocks: those allocated, and those freed that another stream uses."""
    requested_peak_bytes: int
    events: int
    """Allocations, frees asked for and frees completed since the process began: a place in the allocator's
    trace, without a clock."""


def read_counters(device: torch.device) -> AllocatorCounters:
    """One read for all: the counters are the host's, and `torch.cuda.memory_allocated` reads them all too."""
    # What `memory_stats_as_nested_dict` calls, without its Python: between two phases each frame counts.
    stats = torch._C._cuda_memoryStats(_index(device))
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    requested, count = stats["requested_bytes"]["all"], stats["allocation"]["all"]
    # A block leaves the allocated ones when its free is asked for and the active ones when it is completed.
    completed = stats["active"]["all"]["freed"]
    return AllocatorCounters(
        allocated_bytes=allocated["current"],
        allocated_peak_bytes=allocated["peak"],
        reserved_bytes=reserved["current"],
        reserved_peak_bytes=reserved["peak"],
        requested_bytes=requested["current"],
        requested_peak_bytes=requested["peak"],
        events=count["allocated"] + count["freed"] + completed,
    )


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class CudaMemoryMeter:
    """Reads the caching allocator's counters, which are the host's: nothing waits for the device.

    One read a border: what is allocated between two phases of a step counts to the second.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated_peak = 0
        self._reserved_peak = 0

    def start_step(self) -> PhaseMemory:
        # Saving and the like between two steps is not part of a phase. A reset loses what was reached
        # since the last one, so keep it first.
        counters = self._read_and_reset()
        return PhaseMemory(
            peak_bytes=counters.allocated_peak_bytes, reserved_bytes=counters.reserved_peak_bytes
        )

    def stop_phase(self) -> PhaseMemory:
        counters = self._read_and_reset()
        return PhaseMemory(
            allocated_bytes=counters.allocated_bytes,
            peak_bytes=counters.allocated_peak_bytes,
            reserved_bytes=counters.reserved_bytes,
        )

    def total_bytes(self) -> int | None:
        return read_counters(self._device).allocated_bytes

    def peaks(self) -> Peaks:
        self._keep_peaks(read_counters(self._device))
        return Peaks(
            allocated_bytes=self._allocated_peak,
            reserved_bytes=self._reserved_peak,
            rss_bytes=peak_rss_bytes(),
        )

    def _read_and_reset(self) -> AllocatorCounters:
        counters = read_counters(self._device)
        self._keep_peaks(counters)
        torch._C._cuda_resetPeakMemoryStats(_index(self._device))
        return counters

    def _keep_peaks(self, counters: AllocatorCounters) -> None:
        self._allocated_peak = max(self._allocated_peak, counters.allocated_peak_bytes)
        self._reserved_peak = max(self._reserved_peak, counters.reserved_peak_bytes)


class ResidentMeter:
    """The resident set: reset of the kernel's high-water mark where permitted, else the phase's ends.

    Read and set back once a border, as on CUDA.
    """

    def __init__(self) -> None:
        self._peak: int | None = None
        self._resettable = True

    def start_step(self) -> PhaseMemory:
        resettable = self._resettable
        peak = self._read_and_reset()
        return PhaseMemory(peak_bytes=peak if resettable else None)

    def stop_phase(self) -> PhaseMemory:
        resettable = self._resettable
        peak = self._read_and_reset()
        now = rss_after_reset_bytes() if self._resettable else rss_bytes()
        return PhaseMemory(allocated_bytes=now, peak_bytes=largest(peak, now) if resettable else now)

    def total_bytes(self) -> int | None:
        return rss_bytes()

    def peaks(self) -> Peaks:
        self._peak = largest(self._peak, peak_rss_bytes())
        return Peaks(rss_bytes=self._peak)

    def _read_and_reset(self) -> int | None:
        peak = peak_rss_bytes()
        self._peak = largest(self._peak, peak)
        self._resettable = reset_peak_rss()
        return peak
