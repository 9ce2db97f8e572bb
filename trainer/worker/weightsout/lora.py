"""Adapters of a saved state: added to their base, or alone as PEFT has them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.trainer.worker.adapters import lora_config
from llmtop.trainer.worker.weightsout.statetensors import Tensor, Tensors, model_name

_NAME = re.compile(r"(.*)\.lora_([AB])\.default\.weight")
_NAMED_FOR_PEFT = ".default."


class Adapter(Struct, frozen=True, kw_only=True, eq=False):
    """Down to the rank and up again: outputs = up x down x inputs x scale."""

    down: Tensor
    up: Tensor


def is_adapter(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def adapters_of(tensors: Tensors) -> dict[str, Adapter]:
    """Module of the model to its adapter. Raises LlmtopError for one of which a half is missing."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match:
            halves.setdefault(model_name(match.group(1)), {})[match.group(2)] = tensor
    for module, found in halves.items():
        if len(found) != 2:
            raise LlmtopError(
                f"the saved state has half of the adapter of {module}",
                why=f"lora_{next(iter(set('AB') - set(found)))} is not in it",
                fix="take another checkpoint: --from STEP",
            )
    return {module: Adapter(down=found["A"], up=found["B"]) for module, found in halves.items()}


def scale_of(spec: RunSpec) -> float:
    alpha = spec.options.lora_alpha
    return (alpha if alpha is not None else 2.0 * spec.options.lora_rank) / spec.options.lora_rank


def merge(base: Tensors, adapters: dict[str, Adapter], skeleton: Any, scale: float) -> Tensors:
    """The base with what the adapters add to it, in fp32. Raises LlmtopError for one without a base."""
    modules = dict(skeleton.named_modules())
    merged = dict(base)
    for name, adapter in adapters.items():
        weight = f"{name}.weight"
        if weight not in base:
            raise LlmtopError(
                f"the base has no {weight}, which an adapter belongs to",
                fix="take the model and the versions that the run was trained with",
            )
        # GPT-2's Conv1D has its weight the other way round.
        transposed = not isinstance(modules[name], torch.nn.Linear)
        merged[weight] = Tensor(
            shape=base[weight].shape, read=partial(_read_merged, base[weight], adapter, scale, transposed)
        )
    return merged


def _read_merged(
    base: Tensor, adapter: Adapter, scale: float, transposed: bool, dtype: torch.dtype
) -> torch.Tensor:
    added = adapter.up.read(torch.float32) @ adapter.down.read(torch.float32)
    added *= scale
    values = base.read(torch.float32)
    values += added.T if transposed else added
    return values.to(dtype)


def for_peft(tensors: Tensors) -> Tensors:
    """The adapters by the names that PEFT's files have."""
    return {
        name.replace(_NAMED_FOR_PEFT, "."): tensor for name, tensor in tensors.items() if is_adapter(name)
    }


def write_adapter_config(folder: Path, skeleton: Any, spec: RunSpec) -> None:
    config = lora_config(skeleton, spec)
    config.base_model_name_or_path = spec.weights_dir
    config.inference_mode = True
    config.save_pretrained(folder)
