"""Faster kernels and recomputation: switches them on, and says afterwards what is really on."""

from __future__ import annotations

import sys
from typing import Any

import torch

from llmtop.presets.errors import UsageError


def apply_liger(family: str, device: torch.device) -> None:
    """Replace the family's modelling code by Liger's kernels; call before the model is built."""
    if device.type != "cuda":
        raise UsageError(
            "Liger kernels need a GPU",
            why="they are Triton kernels, which have no CPU backend",
            fix="use --no-liger on this machine",
        )
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(family)
    if apply is None:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise UsageError(
            f"the installed Liger has no kernels for model family '{family}'",
            why=f"it has: {known}",
            fix="use --no-liger for this model",
        )
    apply()


def liger_kernels_in(model: torch.nn.Module) -> tuple[str, ...]:
    """Liger's classes and functions that the built modules use."""
    found: set[str] = set()
    code_modules: set[str] = set()
    for module in model.modules():
        kind = type(module)
        code_modules.add(kind.__module__)
        forward = getattr(module.forward, "__func__", module.forward)
        if _is_liger(kind):
            found.add(kind.__name__)
        elif _is_liger(forward):
            found.add(forward.__name__)
    for name in code_modules:
        rotary = getattr(sys.modules.get(name), "apply_rotary_pos_emb", None)
        if rotary is not None and _is_liger(rotary):
            found.add(rotary.__name__)
    return tuple(sorted(found))


def enable_checkpointing(model: Any, *, reentrant: bool) -> None:
    """Recompute each block in the backward pass instead of keeping its activations."""
    if not model.supports_gradient_checkpointing:
        raise UsageError(
            f"{type(model).__name__} has no gradient checkpointing", fix="use --no-gradient-checkpointing"
        )
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        # The first block's input must require a gradient, or reentrant checkpointing drops the graph
        # when the embeddings are frozen.
        model.enable_input_require_grads()


def attention_in(model: Any) -> str | None:
    """The attention implementation that the modules really use."""
    config = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    return str(name) if name is not None else None


def _is_liger(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("liger_kernel")
