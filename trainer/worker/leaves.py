"""ZeRO-3's leaf modules, gathered as one: what the model must be like for them, and which cannot be one."""

from __future__ import annotations

from typing import Any

import torch

from llmtop.presets.errors import UsageError

_FIX = (
    "name other classes in deepspeed.zero_optimization.leaf_module, as those of whole blocks, or lower"
    " stage3_module_granularity_threshold; or leave both out"
)


def has_leaves(deepspeed_config: dict[str, Any]) -> bool:
    """Whether the configuration makes some module a leaf, by its name or by its size."""
    zero = deepspeed_config.get("zero_optimization") or {}
    threshold = zero.get("stage3_module_granularity_threshold", 0)
    return zero.get("stage") == 3 and bool(threshold or any((zero.get("leaf_module") or {}).values()))


def check_leaves(model: torch.nn.Module) -> None:
    """Raise UsageError where the whole model is a leaf; others are looked at as they are first called.

    DeepSpeed's hooks go by what a leaf is given by position and by the tensors that it returns
    (deepspeed 0.19.8 `runtime/zero/parameter_offload.py`). To be called once the engine is built.
    """
    from deepspeed.utils import z3_leaf_module
    from transformers import PreTrainedModel

    for name, module in model.named_modules():
        if not z3_leaf_module(module):
            continue
        if any(isinstance(part, PreTrainedModel) for part in module.modules()):
            raise UsageError(
                f"a leaf of ZeRO-3 is the whole {type(module).__name__}",
                why="what a model returns is no tensor, and DeepSpeed would leave its gradients alone",
                fix=_FIX,
            )
        _check_when_called(name, module)


def _check_when_called(name: str, module: torch.nn.Module) -> None:
    def look(_: torch.nn.Module, by_position: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        handle.remove()
        if _has_tensor(by_name.values()) and not _has_tensor(by_position):
            raise UsageError(
                f"a leaf of ZeRO-3 is {name}, a {type(module).__name__}",
                why="it is given its input by keyword, and DeepSpeed would let go of its weights too early",
                fix=_FIX,
            )

    handle = module.register_forward_pre_hook(look, with_kwargs=True)


def _has_tensor(values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)
