"""Faster kernels and recomputation: switches them on, and says afterwards what is really on."""

from __future__ import annotations

from typing import Any

import torch

from llmtop.presets.errors import UsageError
from llmtop.presets.liger import apply_arguments


def apply_liger(family: str, kernels: str, device: torch.device) -> None:
    """Replace the family's modelling code by the chosen kernels of Liger; call before the model is built."""
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
    apply(**apply_arguments(family, kernels))


def enable_checkpointing(model: Any, *, reentrant: bool, every: int = 1) -> None:
    """Recompute blocks 0, `every`, ... in the backward pass instead of keeping their activations."""
    if not model.supports_gradient_checkpointing:
        raise UsageError(
            f"{type(model).__name__} has no gradient checkpointing", fix="use --no-gradient-checkpointing"
        )
    # The older name is deprecated in transformers 5.24; 5.17 has no other.
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    if every > 1:
        _checkpoint_every(model, every)
    if reentrant:
        # The first block's input must require a gradient, or reentrant checkpointing drops the graph
        # when the embeddings are frozen.
        model.enable_input_require_grads()


def disable_checkpointing(model: Any) -> None:
    """Keep all activations; nothing happens where checkpointing is off or unknown."""
    if model.supports_gradient_checkpointing:
        newer = getattr(model, "activation_checkpointing_disable", None)
        (newer or model.gradient_checkpointing_disable)()


def _checkpoint_every(model: Any, every: int) -> None:
    """Leave checkpointing on in blocks 0, `every`, 2 x `every`, ... alone.

    transformers 5.24 can do it itself, from `every_n_layers`; 5.17 cannot. Both read the flag of each block.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise UsageError(
            f"checkpointing_every = {every} with {type(model).__name__}",
            why="its code checkpoints all blocks or none: they have no switch of their own",
            fix="use --checkpointing-every 1",
        )
    for index, block in enumerate(blocks):
        block.gradient_checkpointing = index % every == 0
