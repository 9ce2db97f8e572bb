"""How many sequences of which length a forward pass is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct

_IDS = ("input_ids", "inputs_embeds", "labels")
"""What the models of transformers call their input, and what stands for it."""


class BatchShape(Struct, frozen=True, kw_only=True):
    sequences: int
    length: int
    """Tokens of each, with its padding."""

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def largest_with(self, other: BatchShape) -> BatchShape:
        return self if self.tokens >= other.tokens else other


def batch_shape(given: tuple[Any, ...], named: Mapping[str, Any]) -> BatchShape | None:
    """Of a forward pass's arguments; None where nothing in them looks like tokens."""
    tables = [named, *(one for one in given if isinstance(one, Mapping))]
    for name in _IDS:
        for table in tables:
            found = _shape(table.get(name))
            if found is not None:
                return found
    whole = (one for one in given if isinstance(one, torch.Tensor) and not one.is_floating_point())
    return next((shape for one in whole if (shape := _shape(one)) is not None), None)


class BatchShapes:
    """The same from one pass to the next, most of which are alike: then as little is done as can be."""

    def __init__(self) -> None:
        self._size: torch.Size | None = None
        self._newest: BatchShape | None = None

    def of(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> BatchShape | None:
        """As `batch_shape` says; the very same object for the same shape."""
        ids = named.get(_IDS[0])
        size = ids.shape if isinstance(ids, torch.Tensor) else None
        if size is None or size != self._size:
            # Of a table of tokens nothing else is asked.
            self._size = size if size is not None and len(size) > 1 else None
            self._newest = batch_shape(given, named)
        return self._newest


def _shape(tensor: Any) -> BatchShape | None:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        return None
    return BatchShape(sequences=int(tensor.shape[0]), length=int(tensor.shape[1]))
