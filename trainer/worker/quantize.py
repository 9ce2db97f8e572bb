"""Base weights in 8 or 4 bits, through bitsandbytes: loaded so, or made so at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmtop.presets.spec import Quantization, RunSpec


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


def random_quantized(
    make_model: Callable[[], Any], kind: Quantization, dtype: torch.dtype, device: torch.device
) -> Any:
    """A model with random weights, quantized layer by layer, so that it never exists in full precision."""
    import bitsandbytes as bnb
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device("meta"):
        model = make_model()
    head = model.get_output_embeddings()
    spread = float(getattr(model.config, "initializer_range", None) or 0.02)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_packed(child) and child is not head:
                weight = torch.empty(_shape(child), dtype=dtype, device=device).normal_(0.0, spread)
                made = _quantized_linear(bnb, child, weight, kind, dtype).to(device)
                # Said of the weight too: GPT-2 draws those of its children anew from above.
                made._is_hf_initialized = made.weight._is_hf_initialized = True
                setattr(parent, name, made)
    for module in model.modules():
        _leave_meta(module, device)
    model.initialize_weights()
    model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def packed_modules(model: Any) -> dict[str, Any]:
    """Of a model in full precision: the modules whose weights are packed, by name."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in model.named_modules() if _is_packed(module) and module is not head
    }


def packed_and_unpacked(weight: torch.Tensor, kind: Quantization, dtype: torch.dtype) -> torch.Tensor:
    """A weight, outputs first, with the values that its packed form stands for, in the type of the run."""
    import bitsandbytes.functional as functional

    if kind == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        values: torch.Tensor = codes.float() * (scales.float().view(-1, 1) / 127)
        return values.to(dtype)
    packed, state = functional.quantize_4bit(
        weight.to(dtype).contiguous(), quant_type="nf4", compress_statistics=True, quant_storage=dtype
    )
    unpacked: torch.Tensor = functional.dequantize_4bit(packed, state).view(weight.shape)
    return unpacked


def packed_start(weight: torch.Tensor, kind: Quantization, dtype: torch.dtype) -> torch.Tensor:
    """The first numbers of a weight's packed form, as they lie in memory."""
    import bitsandbytes.functional as functional

    if kind == "int8":
        codes, _, _ = functional.int8_vectorwise_quant(weight[:1].to(torch.float16))
        return torch.as_tensor(codes).view(-1)
    start = weight.to(dtype).contiguous().view(-1)[:_START_ELEMENTS]
    packed, _ = functional.quantize_4bit(
        start, quant_type="nf4", compress_statistics=False, quant_storage=dtype
    )
    return torch.as_tensor(packed).view(-1)


_START_ELEMENTS = 256
"""Whole blocks of 64, each of which is packed by itself."""


def _is_packed(module: torch.nn.Module) -> bool:
    """Whether transformers would pack it too (`integrations/bitsandbytes.py`): no class that derives from it.

    Llama-4's router is such a class, and does more than multiply.
    """
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D) or type(module) is torch.nn.Linear


def _shape(linear: Any) -> tuple[int, int]:
    """Outputs and inputs; GPT-2's `Conv1D` keeps its weight the other way round."""
    rows, columns = linear.weight.shape
    return (rows, columns) if isinstance(linear, torch.nn.Linear) else (columns, rows)


def _quantized_linear(
    bnb: Any, linear: Any, weight: torch.Tensor, kind: Quantization, dtype: torch.dtype
) -> Any:
    """A layer in place of `linear`; moving it to its device is what packs 4-bit weights."""
    outputs, inputs = _shape(linear)
    sizes = (inputs, outputs)
    bias = None if linear.bias is None else torch.zeros(outputs, dtype=dtype)
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(*sizes, bias is not None, has_fp16_weights=False)
        # Moving packs only what comes from the host (bitsandbytes 0.50 `nn/modules.py:Int8Params.to`): a
        # weight that is on the device would stay in 16 bits until the first forward pass.
        packed, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
        made.weight = bnb.nn.Int8Params(
            packed, requires_grad=False, has_fp16_weights=False, CB=packed, SCB=scales
        )
    else:
        form = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": dtype}
        made = bnb.nn.Linear4bit(*sizes, bias is not None, compute_dtype=dtype, **form)
        made.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=made, **form)
    made.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    return made


def _leave_meta(module: torch.nn.Module, device: torch.device) -> None:
    """Give the module's own tensors memory; their values come later."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            setattr(module, name, torch.empty_like(buffer, device=device))
