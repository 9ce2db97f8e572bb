"""Faster kernels and recomputation: switches them on, and says afterwards what is really on."""

from __future__ import annotations

import sys
from typing import Any

import torch

from llmtop.presets.errors import UsageError
from llmtop.presets.liger import apply_arguments, in_order

_CLASS_KERNELS = (
    ("RMSNorm", "rms_norm"),
    ("LayerNorm", "layer_norm"),
    ("ReLUSquared", "relu_squared"),
    ("SwiGLU", "glu"),
    ("GEGLU", "glu"),
    ("BlockSparseTop2MLP", "glu"),
    ("LigerExperts", "glu"),
    ("FusedLinearCrossEntropy", "fused_linear_cross_entropy"),
    ("CrossEntropy", "cross_entropy"),
)
"""Part of a class's name in liger-kernel 0.8.5 to the word of the option; the first that fits counts."""
_FUSED_LOSS_FORWARDS = ("lce_forward", "causal_forward")
"""Forward methods of whole models in its `transformers/model/`; the second is Gemma-3's."""
_ROTARY_FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_emb")
"""What the families' code calls its rotary function; the second is Llama-4's."""
_ROPE = "rotary_pos_emb"
"""Part of the name of each of Liger's rotary functions."""


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


def liger_kernels_in(model: torch.nn.Module) -> tuple[str, ...]:
    """Liger's kernels that the built modules use, by the words of the option `liger_kernels`.

    What is of Liger and in none of the tables stands under its own name.
    """
    found: set[str] = set()
    code_modules: set[str] = set()
    for module in model.modules():
        kind = type(module)
        code_modules.add(kind.__module__)
        forward = getattr(module.forward, "__func__", module.forward)
        if _is_liger(kind):
            found.add(_kernel_of_class(kind))
        elif _is_liger(forward):
            found.add(_kernel_of_forward(forward))
    for name in code_modules:
        for rotary_name in _ROTARY_FUNCTIONS:
            rotary = getattr(sys.modules.get(name), rotary_name, None)
            if rotary is not None and _is_liger(rotary):
                found.add("rope" if _ROPE in rotary.__name__ else str(rotary.__name__))
    # The loss of transformers calls this by its full name; the fused loss does not call it.
    if _is_liger(torch.nn.functional.cross_entropy) and "fused_linear_cross_entropy" not in found:
        found.add("cross_entropy")
    return tuple(in_order(found))


def _kernel_of_class(kind: type) -> str:
    """The word for a class of Liger's, or for the nearest of its bases that has one."""
    for base in kind.__mro__:
        for part, kernel in _CLASS_KERNELS:
            if _is_liger(base) and part in base.__name__:
                return kernel
    return kind.__name__


def _kernel_of_forward(forward: Any) -> str:
    """The word for a forward method that was put on another class: a loss, or a method of Liger's class."""
    owner, _, name = str(forward.__qualname__).rpartition(".")
    if not owner:
        return "fused_linear_cross_entropy" if name in _FUSED_LOSS_FORWARDS else name
    owner = owner.rpartition(".")[2]
    return next((kernel for part, kernel in _CLASS_KERNELS if part in owner), owner)


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


def attention_in(model: Any) -> str | None:
    """The attention implementation that the modules really use."""
    config = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    return str(name) if name is not None else None


def _is_liger(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("liger_kernel")
