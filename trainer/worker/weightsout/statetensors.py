"""The weights in a saved state, each whole again and read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.statefile import Piece, StateIndex, StoredParameter
from llmtop.trainer.worker.state.finding import Stored
from llmtop.trainer.worker.state.names import Named
from llmtop.trainer.worker.state.shardfile import DTYPES


class Tensor(Struct, frozen=True, kw_only=True, eq=False):
    """One tensor of the model, not read yet."""

    shape: tuple[int, ...]
    read: Callable[[torch.dtype], torch.Tensor]
    """In host memory, in the type that is asked for."""
    dtype: torch.dtype | None = None
    """The only type that it is written in; None for any."""


Tensors = dict[str, Tensor]

_PEFT = "base_model.model."
_UNDER_ADAPTER = ".base_layer."


def model_name(name: str) -> str:
    """Of a tensor, without what PEFT puts into it."""
    return name.removeprefix(_PEFT).replace(_UNDER_ADAPTER, ".")


class StateTensors:
    """A `step-N` folder with its files open; what is removed meanwhile can still be read."""

    def __init__(self, folder: Path, index: StateIndex) -> None:
        self.index = index
        self._names = {number: one.name for number, one in enumerate(index.parameters)}
        named = [
            Named(number=number, name=name, aliases=(), parameter=None)
            for number, name in self._names.items()
        ]
        self._stored = Stored(folder, index, named)
        try:
            for file in index.files:
                self._stored.reader(file.name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stored.close()

    def parameters(self) -> dict[int, Tensor]:
        """Number to tensor. Raises LlmtopError for one of which an element is in none of the files."""
        found = {}
        for number, one in enumerate(self.index.parameters):
            if one.saved:
                self._stored.find([self._whole(number, one)], self._names.__getitem__)
                found[number] = Tensor(shape=one.shape, read=partial(self._read, number, one))
        return found

    def buffers(self) -> Tensors:
        return {
            one.name: Tensor(
                shape=one.shape, read=partial(self._read_buffer, one.name, one.file), dtype=DTYPES[one.dtype]
            )
            for one in self.index.buffers
        }

    def _whole(self, number: int, one: StoredParameter) -> Piece:
        return Piece(number, 0, one.elements, 0)

    def _read(self, number: int, one: StoredParameter, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(one.shape, dtype=dtype)
        flat = values.view(-1)
        for run in self._stored.find([self._whole(number, one)], self._names.__getitem__):
            where = flat[run.target : run.target + run.count]
            self._stored.reader(run.file).read_all([(run.slab.weights, run.source, where)])
        return values

    def _read_buffer(self, name: str, file: str, dtype: torch.dtype) -> torch.Tensor:
        key = f"buffer.{name}"
        reader = self._stored.reader(file)
        if key not in reader:
            raise LlmtopError(f"{reader.path} is damaged", why=f"it has no {key}, which the index names")
        shape = next(one.shape for one in self.index.buffers if one.name == name)
        return reader.tensor(key).view(shape).to(dtype)
