"""LoRA adapters: which modules get them, and in which precision they are kept."""

from __future__ import annotations

from typing import Any

import torch

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec

# Path components of a block's two halves, over the families.
_ATTENTION_WORDS = ("attn", "attention")
_MLP_WORDS = ("mlp", "ffn", "feed_forward", "experts", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h")


def add_lora(model: Any, spec: RunSpec) -> Any:
    """Wrap the model so that only low-rank adapters train, kept in the model's own precision."""
    from peft import LoraConfig, get_peft_model

    options = spec.options
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha if options.lora_alpha is not None else 2 * options.lora_rank,
        lora_dropout=0.0,
        target_modules=lora_targets(model, options.lora_targets),
    )
    # The optimizer keeps its own fp32 master copy, so the adapters need no upcast.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def lora_targets(model: Any, choice: str) -> str | list[str]:
    """`all-linear`, or the full names of the modules that a choice means."""
    if choice == "all-linear":
        return choice
    linear = _linear_names(model)
    if choice in ("attention", "mlp"):
        words = _ATTENTION_WORDS if choice == "attention" else _MLP_WORDS
        chosen = [name for name in linear if any(word in name for word in words)]
    else:
        wanted = {part.strip() for part in choice.split(",") if part.strip()}
        leaves = {name.rpartition(".")[2] for name in linear}
        unknown = sorted(wanted - leaves - set(linear))
        if unknown:
            raise UsageError(
                f"lora_targets: the model has no linear module named '{unknown[0]}'",
                fix=f"its linear modules are: {', '.join(sorted(leaves))}",
            )
        chosen = [name for name in linear if name in wanted or name.rpartition(".")[2] in wanted]
    if not chosen:
        raise UsageError(f"lora_targets = {choice!r} matches no module of {type(model).__name__}")
    return chosen


def _linear_names(model: Any) -> list[str]:
    """Every linear module but the head, which adapters leave alone."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    ]
