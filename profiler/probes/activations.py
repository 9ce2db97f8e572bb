"""Counts what autograd saves for the backward pass, by storage, during one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from msgspec import Struct

from llmtop.profiler.memory.result import Component

See = Callable[[torch.Tensor, Component], None]
"""Told of each tensor that is recognised, at the time when it is."""


class SavedBytes(Struct, frozen=True, kw_only=True):
    activations: int
    logits: int
    """Saved tensors whose last dimension is the vocabulary."""


class ActivationCounter:
    """Watches forward passes on request. Weights that autograd keeps are not counted.

    It must not keep anything alive that autograd would not: only numbers are remembered here, and what the
    hooks hand back is what autograd would have kept.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._storages: dict[int, tuple[int, bool]] = {}
        self._weights: set[int] = set()
        self._see: See | None = None
        self.seconds = 0.0
        """What looking has taken of the last watched forward pass."""

    @contextmanager
    def watching(self, see: See | None = None) -> Iterator[None]:
        """During a forward pass. `see` goes on being called in its backward, when weights are used again."""
        self._storages, self._weights, self.seconds = {}, set(), 0.0
        self._see = see
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def saved_bytes(self, weights: set[int]) -> SavedBytes:
        """Of the last watched forward pass, while its graph is still alive; `weights` are the addresses of
        storages that hold such now."""
        weights = self._weights | weights
        activations = logits = 0
        for address, (size, is_logits) in self._storages.items():
            if address in weights:
                continue
            if is_logits:
                logits += size
            else:
                activations += size
        return SavedBytes(activations=activations, logits=logits)

    def forget_observer(self) -> None:
        self._see = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        began = perf_counter()
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if is_weight(tensor):
            # ZeRO-3 frees a gathered weight after use and its address may then hold an activation.
            if address not in self._storages:
                self._weights.add(address)
        else:
            is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size
            known = self._storages.get(address)
            self._storages[address] = (storage.nbytes(), is_logits or (known is not None and known[1]))
        if self._see is not None:
            self._see(tensor, saved_as(tensor, self._vocab_size))
        kept = to_keep(tensor)
        self.seconds += perf_counter() - began
        return kept

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._see is not None and isinstance(tensor, torch.nn.Parameter):
            self._see(tensor, Component.PARAMETERS)
        return tensor


def to_keep(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor in the graph without keeping more than the graph itself would.

    An output saved as itself would keep its own graph alive in a cycle. A weight is a leaf, so it may stand
    for itself, and must: ZeRO-3 frees a gathered weight by giving it another storage, and an alias made
    before would keep the old one until the backward pass.
    """
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()


def saved_as(tensor: torch.Tensor, vocab_size: int) -> Component:
    """What a saved tensor is, by its kind and its shape."""
    if is_weight(tensor):
        return Component.PARAMETERS
    if tensor.dim() > 1 and tensor.shape[-1] == vocab_size:
        return Component.LOGITS
    if tensor.dim() == 2 and tensor.shape[0] == vocab_size:
        # Liger's fused loss makes the head's gradient in the forward pass.
        return Component.GRADIENTS
    return Component.ACTIVATIONS


def is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
