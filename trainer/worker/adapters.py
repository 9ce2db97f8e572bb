"""LoRA adapters, and base weights in 8 or 4 bits."""

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


def quantization_config(spec: RunSpec, dtype: torch.dtype) -> Any:
    """What transformers needs to load weights quantized; None for full precision."""
    if spec.options.quantization == "none":
        return None
    from transformers import BitsAndBytesConfig

    if spec.options.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # Packed in the model's own type, so that DeepSpeed finds one type in all flat buffers.
        bnb_4bit_quant_storage=dtype,
    )


def quantize_linears(model: Any, spec: RunSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Quantize the linear layers of a model with random weights, one at a time, onto the device."""
    import bitsandbytes as bnb

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear) and child is not head:
                setattr(parent, name, _quantized(bnb, child, spec.options.quantization, dtype, device))
    model.to(device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _quantized(
    bnb: Any, linear: torch.nn.Linear, kind: str, dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    bias = linear.bias is not None
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        made = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias,
            compute_dtype=dtype,
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=dtype,
        )
        made.weight = bnb.nn.Params4bit(
            linear.weight.data,
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=dtype,
            module=made,
        )
    made.bias = linear.bias
    # Moving it to its device is what quantizes it.
    module: torch.nn.Module = made.to(device)
    return module


def _linear_names(model: Any) -> list[str]:
    """Every linear module but the head, which adapters leave alone."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    ]
