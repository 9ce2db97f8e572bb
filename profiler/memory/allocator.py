"""From allocated to reserved to what NVML reads: the caching allocator and what lies outside it."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.states import StateBytes

RESERVED_LOW, RESERVED_HIGH = 1.01, 1.25
"""Reserved over allocated at the peak, the range seen in 27 H200 runs (torch 2.11, default allocator)."""
CONTEXT_BYTES = 2_020_000_000
"""Device minus reserved on one H200: driver reserve 0.64 GB, context 0.55 GB, the rest NCCL and kernels."""
PEER_BYTES = 520_000_000
"""More of it with two or more ranks: NCCL's channels to its peers."""


def reserved_range(peak_allocated_bytes: int) -> tuple[int, int]:
    """Low and high bound of `torch.cuda.max_memory_reserved`."""
    return round(peak_allocated_bytes * RESERVED_LOW), round(peak_allocated_bytes * RESERVED_HIGH)


def likely_reserved(peak_allocated_bytes: int, transient_bytes: int) -> int:
    """The middle guess: large blocks that came and went leave holes that later requests do not fit."""
    low, high = reserved_range(peak_allocated_bytes)
    return min(high, max(low, peak_allocated_bytes + round(0.25 * transient_bytes)))


def context_bytes(spec: RunSpec) -> int:
    """Device memory outside the allocator."""
    return CONTEXT_BYTES + (PEER_BYTES if spec.world_size > 1 else 0)


def device_bytes(spec: RunSpec, sizes: Sizes, states: StateBytes, reserved_bytes: int) -> int:
    """What NVML reads as used on the device."""
    del sizes
    return reserved_bytes + context_bytes(spec) + states.outside_allocator
