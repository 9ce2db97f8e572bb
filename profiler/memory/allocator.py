"""From allocated to reserved to what NVML reads: the caching allocator and what lies outside it."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.nccl import network_bytes
from llmtop.profiler.memory.result import Component, Moment, MomentBytes
from llmtop.profiler.memory.secondary import second_ranks

PASS_FACTOR, STEP_FACTOR, SHARED_FACTOR = 1.065, 1.41, 1.05
"""Of the passes' peak, of the optimizer step's transient beside it, and of the smaller of the two transients,
which finds room in what the other has freed. Large blocks of the step do not fit the many small ones that the
backward pass has freed, so the two together need more than the larger."""
GATHERED_FACTOR, GATHERED_LOGITS_FACTOR = 1.47, 0.33
"""Of the weights that ZeRO-3 gathers, and of the logits beside them: gathered weights come and go among
activations and leave holes of their own sizes. All five are fitted to 144 H200 runs that are not held out
(torch 2.11, default allocator): mean error 5.4 % there, 5.2 % on the held-out ones."""
LOW, HIGH = 0.91, 1.17
"""The range around the likely value: nineteen in twenty of those runs lie in it."""
SIMULATED = (0.96, 1.05)
"""The range around what the simulated allocator holds. Nineteen in twenty of 156 runs that are not held out
lie within 1.6 %; beyond are runs whose largest block just fitted, or just did not: 10 % either way."""
PASSES = (Moment.FORWARD_END, Moment.LOSS_BACKWARD, Moment.LAST_BLOCK_BACKWARD, Moment.FIRST_BLOCK_BACKWARD)
DRIVER_RESERVE_BYTES = 645_000_000
"""What the driver holds of a device before any process comes (H200, driver 580)."""
CONTEXT_BYTES = 543_000_000
GROUP_BYTES, PEERS_BYTES = 682_000_000, 295_000_000
"""NCCL's first group, and its channels to peers where there are any."""
ENGINE_BYTES = 407_000_000
"""Of a rank without peers: what DeepSpeed's initialization loads."""
PEERS_ENGINE_BYTES, PEERS_STAGE3_BYTES = 514_000_000, 212_000_000
"""The same with peers: stages 0 to 2 broadcast the weights, which stage 3 does not."""
STEP_BYTES, SDPA_BYTES, INT8_BYTES = 139_000_000, 20_000_000, 67_000_000
"""Kernels that the first step loads: everybody's, those of SDPA, of bitsandbytes' 8-bit products."""


def likely_reserved(moments: tuple[MomentBytes, ...], room_bytes: int | None) -> int:
    """The middle guess of `torch.cuda.max_memory_reserved`, from the moments of a step.

    `room_bytes` is what the device leaves to the allocator; None where that is not known.
    """
    totals = {moment.name: moment.total_bytes for moment in moments}
    steady = totals[Moment.STEADY]
    passes = max(totals[name] for name in PASSES)
    step = totals[Moment.OPTIMIZER_STEP] - steady
    peak = max(total for name, total in totals.items() if name is not Moment.INIT)
    guess = PASS_FACTOR * passes + STEP_FACTOR * step - SHARED_FACTOR * min(passes - steady, step)
    gathered = _gathered(moments)
    if gathered:
        guess += GATHERED_FACTOR * gathered + GATHERED_LOGITS_FACTOR * _logits(moments)
    likely = round(max(guess, peak * 1.01))
    return likely if room_bytes is None else min(likely, room_bytes)


def _gathered(moments: tuple[MomentBytes, ...]) -> int:
    """Weights that are there in the passes only."""
    held = {moment.name: moment.components.get(Component.PARAMETERS, 0) for moment in moments}
    return max(0, held[Moment.FORWARD_END] - held[Moment.STEADY])


def _logits(moments: tuple[MomentBytes, ...]) -> int:
    return max(moment.components.get(Component.LOGITS, 0) for moment in moments)


def reserved_range(
    likely_bytes: int,
    peak_allocated_bytes: int,
    room_bytes: int | None,
    shares: tuple[float, float] = (LOW, HIGH),
) -> tuple[int, int]:
    """Low and high bound of `torch.cuda.max_memory_reserved`, at these shares of the likely value."""
    low = max(peak_allocated_bytes, round(likely_bytes * shares[0]))
    high = round(likely_bytes * shares[1])
    return low, max(low, high if room_bytes is None else min(high, room_bytes))


def outside_parts(spec: RunSpec) -> dict[Component, int]:
    """Device memory outside the allocator by name, from differences of NVML's readings during start-up.

    What NCCL has for other nodes and for a second group of ranks is by its sources; the rest was measured on
    42 runs on H200 (torch 2.11, DeepSpeed 0.19.8, NCCL 2.28, driver 580), which were alike to
    a few MB; other GPUs load other kernels, so there it is an estimate.
    """
    options, peers = spec.options, spec.world_size > 1
    groups = 1 + (second_ranks(spec) > 1)
    engine = ENGINE_BYTES
    if peers:
        engine = PEERS_STAGE3_BYTES if options.zero == 3 else PEERS_ENGINE_BYTES
    kernels = engine + STEP_BYTES
    kernels += SDPA_BYTES if options.attention == "sdpa" else 0
    kernels += INT8_BYTES if options.quantization == "int8" else 0
    return {
        Component.CUDA_CONTEXT: CONTEXT_BYTES,
        Component.NCCL: GROUP_BYTES + (groups * PEERS_BYTES if peers else 0) + network_bytes(spec),
        Component.LOADED_KERNELS: kernels,
        Component.OTHER_PROCESSES: DRIVER_RESERVE_BYTES,
    }


def context_bytes(spec: RunSpec) -> int:
    """Device memory outside the allocator."""
    return sum(outside_parts(spec).values())
