"""The numbers of a model's parameters, one at a time: from its folder, or from a GGUF file of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gguf
import numpy
import torch

from llmtop.presets.errors import LlmtopError
from llmtop.presets.weightfiles import StoredTensor, safetensors_files, stored_tensors
from llmtop.trainer.quantize.families import Family, family_of, known_family
from llmtop.trainer.quantize.layout import Place, expected, place_of
from llmtop.trainer.quantize.plan import Planned, plan_gguf
from llmtop.trainer.quantize.source import Source
from llmtop.trainer.worker.packing.reading import PIECE_BYTES, in_halves
from llmtop.trainer.worker.stream import CannotStream, plan_stream

_MOST_WORKERS = 8


class Numbers(Protocol):
    """Where a model's parameters come from; names are those of the model's code."""

    def fill(self, name: str, into: torch.Tensor) -> None:
        """Write all numbers of one parameter."""

    def rows(self, name: str, which: torch.Tensor) -> torch.Tensor:
        """Some rows of a matrix, in whatever precision they are kept."""

    def __contains__(self, name: object) -> bool: ...


class _Part(NamedTuple):
    place: Place
    stored: StoredTensor


class FolderNumbers:
    """Of a folder of safetensors; files are mapped, and a tensor is read as it is asked for."""

    def __init__(self, source: Source, make_model: Callable[[], Any], dtype: torch.dtype) -> None:
        """Raises CannotStream for a family whose tensors transformers changes as it loads them."""
        stored = stored_tensors(safetensors_files(source.folder))
        self._parts: dict[str, list[_Part]] = {}
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()  # files are open, and mapped, for as long as this lives
        for part in _parts_of(source, stored, make_model, dtype):
            self._parts.setdefault(part.place.parameter, []).append(part)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def fill(self, name: str, into: torch.Tensor) -> None:
        for part in self._parts[name]:
            _view(into, part.place).copy_(self._read(part.stored))

    def rows(self, name: str, which: torch.Tensor) -> torch.Tensor:
        return self._read(self._parts[name][0].stored)[which]

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        from safetensors import safe_open

        if stored.file not in self._open:
            self._open[stored.file] = self._stack.enter_context(safe_open(stored.file, framework="pt"))
        found: torch.Tensor = self._open[stored.file].get_tensor(stored.key)
        return found


class GgufNumbers:
    """Of a GGUF file that was made of the source; it is mapped, and unpacked piece by piece."""

    def __init__(self, source: Source, kind: str, made: Path) -> None:
        family = family_of(source.shape, str(source.folder))
        self._written = {tensor.name: tensor for tensor in gguf.GGUFReader(made).tensors}
        self._planned: dict[str, list[Planned]] = {}
        self._places: dict[str, list[Place]] = {}
        self._pool = ThreadPoolExecutor(max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)))))
        for planned in plan_gguf(source, kind).planned:
            if planned.tensors:
                places = [place_of(tensor.key, family) for tensor in planned.tensors]
                self._places[planned.name] = places
                self._planned.setdefault(places[0].parameter, []).append(planned)

    def __contains__(self, name: object) -> bool:
        return name in self._planned

    def fill(self, name: str, into: torch.Tensor) -> None:
        for planned in self._planned[name]:
            written, places = self._written[planned.name], self._places[planned.name]
            stacked = written.data if len(planned.shape) > 2 else [written.data]
            for place, data in zip(places, stacked, strict=True):
                _unpack(_view(into, place), data, written.tensor_type, planned, self._pool)

    def rows(self, name: str, which: torch.Tensor) -> torch.Tensor:
        written = self._written[self._planned[name][0].name]
        return torch.from_numpy(
            numpy.array(gguf.dequantize(written.data[which.numpy()], written.tensor_type))
        )


def _parts_of(
    source: Source, stored: dict[str, StoredTensor], make_model: Callable[[], Any], dtype: torch.dtype
) -> Iterator[_Part]:
    try:
        plan = plan_stream(make_model, stored, dtype)
    except CannotStream:
        family = known_family(source.shape)
        if family is None or family.experts is None:
            raise
        yield from _parts_with_experts(source, stored, family)
        return
    if plan.missing or plan.mismatched:
        raise LlmtopError(
            f"the weights in {source.folder} are not those of the model",
            why=f"{(*plan.missing, *plan.mismatched)[0]} is missing or of another shape",
            fix="copy or download the folder again",
        )
    for placed in plan.placed:
        yield _Part(Place(parameter=placed.name), placed.tensor)


def _parts_with_experts(source: Source, stored: dict[str, StoredTensor], family: Family) -> Iterable[_Part]:
    """Where transformers makes one tensor of a block's experts as it loads them."""
    for key in expected(source.shape, family):
        if key not in stored:
            raise LlmtopError(
                f"the weights in {source.folder} lack {key}", fix="copy or download the folder again"
            )
        yield _Part(place_of(key, family), stored[key])


def _view(parameter: torch.Tensor, place: Place) -> torch.Tensor:
    if place.expert is None:
        return parameter
    matrix = parameter[place.expert]
    return matrix if place.half is None else matrix.chunk(2)[place.half]


def _unpack(into: torch.Tensor, data: Any, kind: Any, planned: Planned, pool: ThreadPoolExecutor) -> None:
    """One matrix, or one row of norms or biases: `data` as the file has it."""
    unit = into.shape[0] // planned.heads if planned.heads else 1
    # A bias is one row in the file, and its numbers change places as the rows of its matrix do.
    width = into.shape[1] if into.dim() > 1 else (1 if planned.heads else into.shape[0])
    places = into.view(-1, width)
    data = data.reshape(len(places), -1)
    at_a_time = max(1, PIECE_BYTES // (4 * width * unit)) * unit

    def unpack(first: int) -> torch.Tensor:
        piece = gguf.dequantize(data[first : first + at_a_time], kind).reshape(-1, width)
        if planned.heads:
            piece = in_halves(piece, unit)
        if planned.plus_one:
            piece = piece - numpy.float32(1)
        # Of some types it is the file's own page, which nobody may write to.
        return torch.from_numpy(numpy.array(piece))

    starts = range(0, len(places), at_a_time)
    # As many at once as there are workers: what is unpacked and not yet taken is memory too.
    for _, group in groupby(starts, key=lambda first: first // (at_a_time * _MOST_WORKERS)):
        begins = list(group)
        for first, piece in zip(begins, pool.map(unpack, begins), strict=True):
            places[first : first + len(piece)] = piece.to(places.device, places.dtype)
