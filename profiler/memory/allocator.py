"""From allocated to reserved to what NVML reads: the caching allocator and what lies outside it."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Moment, MomentBytes

PASS_SHARE, STEP_SHARE, INIT_SHARE = 0.985, 0.77, 0.19
"""How much of each phase's transient ends in segments of its own: large blocks of the optimizer step do not
fit the many small ones that the backward pass has freed. Fitted to 27 H200 runs (torch 2.11, default
allocator), mean error 5 %."""
LOW, HIGH = 0.90, 1.15
"""The range around the likely value that holds those runs."""
PASSES = (Moment.FORWARD_END, Moment.LOSS_BACKWARD, Moment.LAST_BLOCK_BACKWARD, Moment.FIRST_BLOCK_BACKWARD)
CONTEXT_BYTES = 2_020_000_000
"""Device minus reserved on one H200: driver reserve 0.64 GB, context 0.55 GB, the rest NCCL and kernels."""
PEER_BYTES = 520_000_000
"""More of it with two or more ranks: NCCL's channels to its peers."""


def likely_reserved(moments: tuple[MomentBytes, ...], room_bytes: int | None) -> int:
    """The middle guess of `torch.cuda.max_memory_reserved`, from the moments of a step.

    `room_bytes` is what the device leaves to the allocator; None where that is not known.
    """
    totals = {moment.name: moment.total_bytes for moment in moments}
    steady = totals[Moment.STEADY]
    passes = max(totals[name] for name in PASSES) - steady
    step = totals[Moment.OPTIMIZER_STEP] - steady
    init = max(0, totals[Moment.INIT] - steady)
    peak = max(total for name, total in totals.items() if name is not Moment.INIT)
    guess = steady + PASS_SHARE * passes + STEP_SHARE * step + INIT_SHARE * init
    likely = round(max(guess, peak * 1.01))
    return likely if room_bytes is None else min(likely, room_bytes)


def reserved_range(likely_bytes: int, peak_allocated_bytes: int, room_bytes: int | None) -> tuple[int, int]:
    """Low and high bound of `torch.cuda.max_memory_reserved`."""
    low = max(peak_allocated_bytes, round(likely_bytes * LOW))
    high = round(likely_bytes * HIGH)
    return low, max(low, high if room_bytes is None else min(high, room_bytes))


def context_bytes(spec: RunSpec) -> int:
    """Device memory outside the allocator."""
    return CONTEXT_BYTES + (PEER_BYTES if spec.world_size > 1 else 0)
