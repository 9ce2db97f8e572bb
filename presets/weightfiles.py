"""The files of a folder of weights: which they are and which tensors they hold, without reading one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.presets.tensorfile import DTYPE_BYTES, BrokenWeights, read_header, what_it_is

_SAFETENSORS = "model.safetensors"
_BIN = "pytorch_model.bin"
_START_BYTES = 32
_ZIP, _PICKLE = b"PK", b"\x80"
"""What torch.save writes, since 1.6 and before."""
_MOST_INDEX_BYTES = 100_000_000
_LONGEST_NAME_BYTES = 255
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class _Index(Struct, frozen=True):
    weight_map: dict[str, Any]
    """Tensor to file."""


class StoredTensor(Struct, frozen=True, kw_only=True):
    """One tensor as its file's header tells of it."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """In the words of safetensors: F32, BF16, ..."""

    @property
    def packed(self) -> bool:
        """Numbers that mean nothing without a scale that lies elsewhere."""
        return self.dtype not in DTYPE_BYTES

    @property
    def is_float(self) -> bool:
        """Numbers that a weight can have; where whole ones stand in their place, those are packed too."""
        return self.dtype in _FLOATS

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 1)


def safetensors_files(folder: Path) -> list[Path]:
    """Every file of the weights; empty where the folder keeps them in another form.

    Raises OSError for one that the index names and that is not there, BrokenWeights for a broken index.
    """
    return _files(folder, _SAFETENSORS)


def bin_files(folder: Path) -> list[Path]:
    """The same for what torch.save wrote, which is looked at where there are no safetensors files."""
    return _files(folder, _BIN)


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Key to tensor, over all safetensors files. Raises BrokenWeights for one that is broken."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        found.update(_tensors_of(file))
    return found


def check_bin(file: Path) -> None:
    """Raises BrokenWeights for what torch.save did not write, or not to its end."""
    if not file.is_file():
        raise BrokenWeights(f"{file.name}: it is not a regular file")
    with file.open("rb") as opened:
        start = opened.read(_START_BYTES)
    if start.startswith(_ZIP):
        import zipfile  # a tenth of what `plan` takes to start

        if not zipfile.is_zipfile(file):
            raise BrokenWeights(f"{file.name}: the file ends too early")
    elif not start.startswith(_PICKLE):
        raise BrokenWeights(f"{file.name}: {what_it_is(start) or 'it is no file that torch.save writes'}")


def packed_weights(stored: dict[str, StoredTensor]) -> list[str]:
    """Those that need scales or tables beside them, as far as names and types tell without the model."""
    return [
        key
        for key, tensor in stored.items()
        if tensor.packed or (key.endswith(".weight") and not tensor.is_float)
    ]


def _files(folder: Path, single: str) -> list[Path]:
    """In the order of transformers: one file, else those of the index."""
    if (folder / single).is_file():
        return [folder / single]
    index = folder / f"{single}.index.json"
    if not index.is_file():
        return []
    names = _file_names(index)
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{index.name} names {', '.join(absent)}, which the folder does not hold")
    return [folder / name for name in names]


def _file_names(index: Path) -> list[str]:
    """Of the folder that the index lies in: what leads elsewhere is no part of it."""
    names = sorted({str(name) for name in _weight_map(index).values()})
    strange = [name for name in names if not _is_plain(name)]
    if strange:
        raise BrokenWeights(f"{index.name} names {strange[0][:80]!r}, which is no file beside it")
    return names


def _is_plain(name: str) -> bool:
    plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    return plain and len(name.encode()) <= _LONGEST_NAME_BYTES


def _weight_map(index: Path) -> dict[str, object]:
    """Tensor to file, as an index says it."""
    try:
        names = read_json(index, _Index, _MOST_INDEX_BYTES).weight_map
    except msgspec.ValidationError as error:
        raise BrokenWeights(f"{index.name} has no weight_map") from error
    except msgspec.DecodeError as error:
        raise BrokenWeights(f"{index.name}: {error}") from error
    if not names:
        raise BrokenWeights(f"{index.name} names no tensor")
    return names


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    return {
        key: StoredTensor(key=key, file=file, shape=entry.shape, dtype=entry.dtype)
        for key, entry in read_header(file).entries.items()
    }
