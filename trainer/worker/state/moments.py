"""The moments of the Adam family as each optimizer keeps them, found by name and made anew.

Read from: torch 2.13 `optim/adam.py:Adam._init_group` (step a tensor, on the device when fused or
capturable); deepspeed 0.19.8 `ops/adam/fused_adam.py:FusedAdam.step` (step an int, counted for the last
tensor of a group only) and `ops/adam/cpu_adam.py:DeepSpeedCPUAdam.step` (`fp32_optimizer_states`);
bitsandbytes 0.50.2 `optim/optimizer.py:Optimizer2State.init_state` (state1 and state2, in 8 bits with absmax
and qmap for tensors of `min_8bit_size` elements and more, in managed memory when paged).
"""

from __future__ import annotations

from typing import Any

import torch

from llmtop.trainer.statefile import ABSMAX, BLOCK_ELEMENTS, CODES, MOMENTS, QMAP
from llmtop.trainer.worker.state.layout import Slab, StateRefused

_TORCH = ("Adam", "AdamW")
_DEEPSPEED = ("FusedAdam", "DeepSpeedCPUAdam")
_BITSANDBYTES = {"exp_avg": ("state1", "absmax1", "qmap1"), "exp_avg_sq": ("state2", "absmax2", "qmap2")}

PART_ELEMENTS = 1 << 24
"""Packed and unpacked at once, for what that takes beside: whole blocks."""

Tensors = dict[str, torch.Tensor]


def refuse_unknown_optimizer(optimizer: Any) -> None:
    if not (type(optimizer).__name__ in _TORCH + _DEEPSPEED or _is_bitsandbytes(optimizer)):
        raise StateRefused(
            f"the state of the optimizer {type(optimizer).__name__} cannot be saved or loaded",
            why="only the Adam family's moments are known by name",
            fix="use an optimizer of the AdamW kind",
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise StateRefused(
            "the state of AMSGrad cannot be saved or loaded",
            why="it keeps a third moment",
            fix="set amsgrad to false",
        )


def held(slab: Slab) -> tuple[Tensors, float | None]:
    """The tensors of a slab's state by their endings, and its step; nothing before the first update."""
    state = slab.owner.state.get(slab.master) or {}
    if not state:
        return {}, None
    found: Tensors = {}
    for moment in MOMENTS:
        if not _is_bitsandbytes(slab.owner):
            found[moment] = state[moment]
            continue
        values, absmax, qmap = _BITSANDBYTES[moment]
        if state[values].dtype == torch.uint8:
            found |= {
                f"{moment}.{CODES}": state[values],
                f"{moment}.{ABSMAX}": state[absmax],
                f"{moment}.{QMAP}": state[qmap],
            }
        else:
            found[moment] = state[values]
    return found, float(state["step"])


def common_step(slab: Slab, steps: dict[int, float]) -> float | None:
    """The step of a slab of FusedAdam: it counts for the last tensor of a group, for all that it updates."""
    if type(slab.owner).__name__ != "FusedAdam":
        return steps.get(id(slab.master))
    masters = [id(one) for one in slab.owner.param_groups[slab.group]["params"]]
    known = [steps[one] for one in [*masters, id(slab.master)] if one in steps]
    return max(known, default=None)


def make(slab: Slab, step: float) -> Tensors:
    """Fresh state of a slab as its optimizer would make it, at this step, for the moments to be put into."""
    optimizer, master = slab.owner, slab.master
    group = optimizer.param_groups[slab.group]
    if _is_bitsandbytes(optimizer):
        _make_bitsandbytes(optimizer, group, slab)
        optimizer.state[master]["step"] = int(step)
    elif type(optimizer).__name__ in _TORCH:
        on_device = group.get("fused") or group.get("capturable")
        device = master.device if on_device else torch.device("cpu")
        optimizer.state[master] = {
            "step": torch.tensor(step, dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
        }
    else:
        full = getattr(optimizer, "fp32_optimizer_states", False)
        dtype = torch.float32 if full else master.dtype
        optimizer.state[master] = {
            "step": int(step),
            "exp_avg": torch.zeros_like(master.data, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(master.data, dtype=dtype),
        }
    tensors, _ = held(slab)
    return {ending: tensor.detach() for ending, tensor in tensors.items()}


def unpack(codes: torch.Tensor, absmax: torch.Tensor, qmap: torch.Tensor, first: int) -> torch.Tensor:
    """The numbers that codes mean, exactly; the codes begin at element `first` of their blocks."""
    blocks = torch.arange(first, first + codes.numel()) // BLOCK_ELEMENTS - first // BLOCK_ELEMENTS
    return qmap[codes.long()] * absmax[blocks]


def pack(values: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, qmap: torch.Tensor) -> None:
    """Put numbers into 8-bit state, each as the nearest code of its block."""
    from bitsandbytes.functional import quantize_blockwise

    for start in range(0, values.numel(), PART_ELEMENTS):
        part = values[start : start + PART_ELEMENTS].to(qmap.device)
        packed, state = quantize_blockwise(part, code=qmap, blocksize=BLOCK_ELEMENTS)
        codes.view(-1)[start : start + PART_ELEMENTS].copy_(packed.view(-1))
        first = start // BLOCK_ELEMENTS
        absmax[first : first + state.absmax.numel()].copy_(state.absmax)


def _make_bitsandbytes(optimizer: Any, group: dict[str, Any], slab: Slab) -> None:
    """Its own code makes the state; ZeRO-3 shows it a slab only while it is stepped on."""
    shown = group["params"]
    group["params"] = [slab.master]
    optimizer.state.pop(slab.master, None)
    try:
        optimizer.init_state(group, slab.master, slab.group, 0)
    finally:
        group["params"] = shown
    if slab.master.device.type == "cuda":
        # Managed memory is being zeroed by the GPU, and is filled by the host next.
        torch.cuda.synchronize(slab.master.device)


def _is_bitsandbytes(optimizer: Any) -> bool:
    kinds = type(optimizer).__mro__
    return any(kind.__name__ == "Optimizer2State" and "bitsandbytes" in kind.__module__ for kind in kinds)
