"""Counts what autograd saves for the backward pass, by storage, during one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct

from llmtop.profiler.probes.classify import parameter_storages


class SavedBytes(Struct, frozen=True, kw_only=True):
    activations: int
    logits: int
    """Saved tensors whose last dimension is the vocabulary."""


class ActivationCounter:
    """Watches forward passes on request. Weights that autograd keeps are not counted."""

    def __init__(self, module: torch.nn.Module, vocab_size: int) -> None:
        self._module = module
        self._vocab_size = vocab_size
        self._storages: dict[int, tuple[int, bool]] = {}
        self._weights: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._storages, self._weights = {}, set()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def saved_bytes(self) -> SavedBytes:
        """Of the last watched forward pass, while its graph is still alive."""
        weights = self._weights | parameter_storages(self._module)
        activations = logits = 0
        for address, (size, is_logits) in self._storages.items():
            if address in weights:
                continue
            if is_logits:
                logits += size
            else:
                activations += size
        return SavedBytes(activations=activations, logits=logits)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if _is_weight(tensor):
            # ZeRO-3 frees a gathered weight after use and its address may then hold an activation.
            if address not in self._storages:
                self._weights.add(address)
        else:
            is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size
            known = self._storages.get(address)
            self._storages[address] = (storage.nbytes(), is_logits or (known is not None and known[1]))
        # An output saved as itself would keep its own graph alive in a cycle.
        return tensor.detach()


def _unpack(tensor: Any) -> Any:
    return tensor


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
