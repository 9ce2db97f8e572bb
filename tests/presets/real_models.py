"""The tensors of a configuration: as the real modelling code builds them, and as they are counted."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from math import prod
from typing import Any

from llmtop.presets.hf import config as hf_config
from llmtop.profiler.cost import shape as arithmetic

Shapes = Counter[tuple[int, ...]]
"""How many tensors there are of each shape, dimensions in ascending order: GPT-2's Conv1D and some experts
store the same matrix transposed."""


def real_shapes(config: dict[str, Any]) -> Shapes:
    """The trainable tensors of the real model, built on the meta device."""
    import torch
    import transformers

    # Some configurations warn about token ids of the published tokenizers.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain = dict(config)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        built = transformers.AutoConfig.for_model(plain.pop("model_type"), **plain)
        model = transformers.AutoModelForCausalLM.from_config(built)
    return Counter(tuple(sorted(parameter.shape)) for parameter in model.parameters())


def counted_shapes(config: dict[str, Any], name: str) -> Shapes:
    """The tensors that the arithmetic counts."""
    counted: Shapes = Counter()
    for group in arithmetic.tensors(hf_config.read_shape(config, name, name)):
        counted[tuple(sorted(group.shape))] += group.count
    return counted


def elements(shapes: Shapes) -> int:
    return sum(prod(shape) * count for shape, count in shapes.items())
