"""Quantization-aware training, by torchao: linear layers that round weights, and inputs, as they run.

Weights stay what they are and keep their names, so a checkpoint of such a run is like any other; the rounding
is in the forward pass, and its gradient passes to the weight as if there were none.
"""

from __future__ import annotations

from typing import Any

import torch

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import Qat


def prepare(model: Any, kind: Qat, group: int) -> None:
    """Replace the linear layers of the blocks; the head and embeddings are left alone.

    Raises LlmtopError for a model that has none.
    """
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig
    from transformers.initialization import no_init_weights

    meant = rounded_layers(model)
    if not meant:
        raise LlmtopError(
            f"qat = {kind}: {type(model).__name__} has no linear layers to round",
            why="torchao replaces torch.nn.Linear, and its matrices are of other classes",
            fix="--qat none",
        )
    # Each new layer makes a weight of its own before it takes the model's: its numbers are never used.
    with no_init_weights():
        quantize_(
            model,
            QATConfig(base_config(kind, group), step="prepare"),
            filter_fn=lambda _, name: name in meant,
        )


def rounded_layers(model: Any) -> frozenset[str]:
    """Names of the linear layers of the blocks, of a model without fake quantization."""
    head = model.get_output_embeddings()
    return frozenset(
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module is not head
    )


def base_config(kind: Qat, group: int) -> Any:
    """What the trained weights are converted with at the end: the rounding in training follows from it."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup

    types: Any = torch
    if kind == "int8-int4":
        return Int8DynamicActivationIntxWeightConfig(
            weight_dtype=types.int4, weight_granularity=PerGroup(group)
        )
    return IntxWeightOnlyConfig(weight_dtype=types.int4, granularity=PerGroup(group))
