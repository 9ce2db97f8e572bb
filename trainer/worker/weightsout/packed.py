"""Weights in the bits that a run with fake quantization was trained for, as torchao keeps them in files."""

from __future__ import annotations

import json
from typing import Any

import torch

from llmtop.presets.spec import RunSpec
from llmtop.trainer.worker.qat import base_config, rounded_layers

_NAMES = "tensor_names"
"""Of the metadata, all that there are; the others name one tensor each."""


class TorchaoPacking:
    """What `QATConfig(..., step="convert")` does to a whole model, one tensor at a time."""

    def __init__(self, skeleton: Any, spec: RunSpec) -> None:
        self._config = base_config(spec.options.qat, spec.options.qat_group)
        self._meant = {f"{name}.weight" for name in rounded_layers(skeleton)}
        self._metadata: dict[str, str] = {}

    def __call__(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Works on tensors without memory too."""
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        packed = {
            name: self._packed(values) if name in self._meant else values for name, values in tensors.items()
        }
        flat, metadata = flatten_tensor_state_dict(packed)
        self._metadata |= {key: words for key, words in metadata.items() if key != _NAMES}
        return dict(flat)

    def metadata(self) -> dict[str, str]:
        return {**self._metadata, _NAMES: json.dumps(sorted(self._metadata))}

    def quantization_config(self) -> Any:
        """For config.json: it tells Transformers how to read the files."""
        from transformers import TorchAoConfig

        return TorchAoConfig(self._config)

    def _packed(self, weight: torch.Tensor) -> Any:
        from torchao.quantization import quantize_

        rows, columns = weight.shape
        layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(layer, self._config)
        return layer.weight
