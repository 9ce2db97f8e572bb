"""What the model and the optimizer of a script are, in the words of llmtop's options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llmtop.profiler.probes.inmodules import attention_in, liger_kernels_in, weights_type_in
from llmtop.profiler.probes.recomputing import is_reentrant
from llmtop.profiler.record.scriptevents import FoundModel

_OPTIMIZERS = {
    "FusedAdam": "adamw",
    "DeepSpeedCPUAdam": "adamw",
    "AdamW": "adamw_torch",
    "Adam": "adamw_torch",
    "AdamW8bit": "adamw_8bit",
    "Adam8bit": "adamw_8bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "PagedAdamW32bit": "paged_adamw_32bit",
    "PagedAdamW": "paged_adamw_32bit",
}
"""Class to option: deepspeed 0.19.8 `ops/adam`, torch, bitsandbytes 0.50.2 `optim/adamw.py`."""
_MOST_WRAPPERS = 8


def unwrapped(module: Any) -> Any:
    """The model inside of engines and data parallel wrappers: the first that has a configuration."""
    for _ in range(_MOST_WRAPPERS):
        if callable(getattr(getattr(module, "config", None), "to_dict", None)):
            return module
        inner = getattr(module, "module", None)
        if inner is None:
            break
        module = inner
    return module


def hf_config(model: Any) -> dict[str, Any] | None:
    """The Hugging Face configuration as JSON holds it; None for a model that has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "to_json_string", None)
    if text is None:
        return None
    read: dict[str, Any] = json.loads(text(use_diff=False))
    return read


def plain_json(value: Any) -> Any:
    """What JSON can hold of a value, and the words of what it cannot."""
    return json.loads(json.dumps(value, default=str))


def found_model(model: Any, optimizer: Any, *, precision: str | None = None) -> FoundModel:
    """`precision` is what the engine says of itself; without one the weights tell."""
    checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
    adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
    return FoundModel(
        precision=precision or _precision(model),
        attention=attention_in(model),
        optimizer=_OPTIMIZERS.get(type(optimizer).__name__),
        liger_kernels=liger_kernels_in(model),
        gradient_checkpointing=checkpointing,
        checkpointing_reentrant=checkpointing and any(map(is_reentrant, model.modules())),
        lora_rank=int(getattr(adapter, "r", 0) or 0),
        lora_targets=_targets(adapter),
        quantization=_quantization(model),
    )


def vocab_size(model: Any) -> int:
    """By which logits are told from activations; 0 where the model does not say."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    size = getattr(text() if text is not None else config, "vocab_size", 0)
    return int(size or 0)


def _precision(model: Any) -> str | None:
    # accelerate keeps the bare forward pass there where autocast wraps it (accelerate 1.10 `accelerator.py`).
    if hasattr(model, "_original_forward"):
        return "autocast"
    return weights_type_in(model)


def _targets(adapter: Any) -> str:
    targets = getattr(adapter, "target_modules", None)
    if targets is None or isinstance(targets, str):
        return str(targets or "all-linear")
    return ",".join(sorted(targets))


def _quantization(model: Any) -> str | None:
    kinds = {type(parameter).__name__ for parameter in _frozen(model)}
    return "nf4" if "Params4bit" in kinds else "int8" if "Int8Params" in kinds else None


def _frozen(model: Any) -> Iterator[Any]:
    return (parameter for parameter in model.parameters() if not parameter.requires_grad)
