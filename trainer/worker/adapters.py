"""LoRA adapters: which modules get them, and in which precision they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec

# Path components of a block's two halves, over the families.
_ATTENTION_WORDS = ("attn", "attention")
_MLP_WORDS = ("mlp", "ffn", "feed_forward", "experts", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h")

_ROUTERS = ("gate", "router", "shared_expert_gate")
"""What chooses experts is trained with them or not at all."""


def add_lora(model: Any, spec: RunSpec) -> Any:
    """Wrap the model so that only low-rank adapters train, kept in the model's own precision."""
    from peft import get_peft_model

    config = lora_config(model, spec)
    with _names_as_they_are(model):
        # The optimizer keeps its own fp32 master copy, so the adapters need no upcast.
        return get_peft_model(model, config, autocast_adapter_dtype=False)


def lora_config(model: Any, spec: RunSpec) -> Any:
    """PEFT's configuration of the adapters that a run has on this model."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    options = spec.options
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha if options.lora_alpha is not None else 2 * options.lora_rank,
        lora_dropout=0.0,
        target_modules=lora_targets(model, options.lora_targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )


@contextmanager
def _names_as_they_are(model: Any) -> Iterator[None]:
    """PEFT 0.21 takes names of a mixture of experts for those of Transformers 4 (`_convert_peft_config_moe`):
    it moves adapters of dense layers, shared experts and routers to the routed experts, whose weights it then
    keeps a second time. It goes by the type that the configuration names."""
    own = model.config.model_type
    model.config.model_type = ""
    try:
        yield
    finally:
        model.config.model_type = own


def lora_targets(model: Any, choice: str) -> list[str]:
    """The full names of the modules that a choice means."""
    linear = _linear_names(model)
    if choice == "all-linear":
        chosen = [name for name in linear if name.rpartition(".")[2] not in _ROUTERS]
    elif choice in ("attention", "mlp"):
        words = _ATTENTION_WORDS if choice == "attention" else _MLP_WORDS
        chosen = [
            name
            for name in linear
            if any(word in name for word in words) and name.rpartition(".")[2] not in _ROUTERS
        ]
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
