"""What a built model really uses, seen from its modules: parameters, attention, Liger's kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from msgspec import Struct

from llmtop.presets.liger import in_order
from llmtop.presets.version import package_versions
from llmtop.profiler.record.events import ModelBuilt

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


_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_ROUNDING_LAYER = "FakeQuantizedLinear"
"""Of torchao 0.18, `quantization/qat/linear.py`."""


class ParameterCounts(Struct, frozen=True, kw_only=True):
    params: int
    trainable_params: int


def model_built(model: Any, optimizer: Any, wrapper: Any, packages: Iterable[str]) -> ModelBuilt:
    """What was really built, which may differ from what was asked for. `wrapper` is the engine's around
    `optimizer`; `packages` are those whose versions are told."""
    counts = count_parameters(model)
    rounding = [one for one in model.modules() if type(one).__name__ == _ROUNDING_LAYER]
    return ModelBuilt(
        params=counts.params,
        trainable_params=counts.trainable_params,
        module_class=type(model).__name__,
        attention=attention_in(model),
        optimizer=type(optimizer).__name__,
        engine_optimizer=type(wrapper).__name__,
        liger=liger_kernels_in(model),
        qat=qat_in(rounding),
        rounding_layers=len(rounding),
        weights_type=weights_type_in(model),
        versions=package_versions(packages),
    )


def weights_type_in(model: torch.nn.Module) -> str | None:
    """Of most of the weights that are not packed, in the words of the option `precision`; None for others."""
    elements: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + _elements(parameter)
    most = max(elements, key=lambda dtype: elements[dtype], default=None)
    return None if most is None else _TYPES.get(most)


def qat_in(layers: list[Any]) -> str | None:
    """What layers that round are made for: with inputs, or weights alone."""
    if not layers:
        return None
    return "int4-weight-only" if layers[0].activation_fake_quantizer is None else "int8-int4"


def count_parameters(model: torch.nn.Module) -> ParameterCounts:
    """Elements as the architecture counts them: whole under ZeRO-3, unpacked when quantized."""
    params = trainable = 0
    for parameter in model.parameters():
        count = _elements(parameter)
        params += count
        trainable += count if parameter.requires_grad else 0
    return ParameterCounts(params=params, trainable_params=trainable)


def _elements(parameter: torch.nn.Parameter) -> int:
    quantized = getattr(parameter, "quant_state", None)
    if quantized is not None:
        return int(torch.Size(quantized.shape).numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


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


def attention_in(model: Any) -> str | None:
    """The attention implementation that the modules really use."""
    config = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    return str(name) if name is not None else None


def _is_liger(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("liger_kernel")
