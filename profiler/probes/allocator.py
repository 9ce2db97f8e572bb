"""Memory at the borders of a step's phases, and the peaks between them."""

from __future__ import annotations

from typing import Protocol

import torch
from msgspec import Struct

from llmtop.profiler.events import PhaseMemory
from llmtop.profiler.probes.resident import peak_rss_bytes, reset_peak_rss, rss_bytes


class Peaks(Struct, frozen=True, kw_only=True):
    """Largest values of the whole run so far."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None


class MemoryMeter(Protocol):
    def start_phase(self) -> None: ...

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


class CudaMemoryMeter:
    """Reads the caching allocator's counters, which are the host's: nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated_peak = 0
        self._reserved_peak = 0

    def start_phase(self) -> None:
        # A reset loses what was reached since the last one, so keep it first.
        self._keep_peaks()
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop_phase(self) -> PhaseMemory:
        self._keep_peaks()
        return PhaseMemory(
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
        )

    def total_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def peaks(self) -> Peaks:
        self._keep_peaks()
        return Peaks(
            allocated_bytes=self._allocated_peak,
            reserved_bytes=self._reserved_peak,
            rss_bytes=peak_rss_bytes(),
        )

    def _keep_peaks(self) -> None:
        self._allocated_peak = max(self._allocated_peak, torch.cuda.max_memory_allocated(self._device))
        self._reserved_peak = max(self._reserved_peak, torch.cuda.max_memory_reserved(self._device))


class ResidentMeter:
    """The resident set: reset of the kernel's high-water mark where permitted, else the phase's ends."""

    def __init__(self) -> None:
        self._peak: int | None = None
        self._resettable = True

    def start_phase(self) -> None:
        self._peak = largest(self._peak, peak_rss_bytes())
        self._resettable = reset_peak_rss()

    def stop_phase(self) -> PhaseMemory:
        now = rss_bytes()
        peak = peak_rss_bytes() if self._resettable else now
        self._peak = largest(self._peak, peak, now)
        return PhaseMemory(allocated_bytes=now, peak_bytes=largest(peak, now))

    def total_bytes(self) -> int | None:
        return rss_bytes()

    def peaks(self) -> Peaks:
        self._peak = largest(self._peak, peak_rss_bytes())
        return Peaks(rss_bytes=self._peak)
