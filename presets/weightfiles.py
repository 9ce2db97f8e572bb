"""The files of a folder of weights: which they are and which tensors they hold, without reading one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from msgspec import Struct

_SAFETENSORS = "model.safetensors"
_BIN = "pytorch_model.bin"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, which is JSON."""
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
_ZIP, _PICKLE = b"PK", b"\x80"
"""What torch.save writes, since 1.6 and before."""
_DTYPE_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""What is read as it is; 8-bit floats and other packed forms need their scales."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class BrokenWeights(Exception):
    """Which file of the weights cannot be used and why, in words."""


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
        return self.dtype not in _DTYPE_BYTES

    @property
    def is_float(self) -> bool:
        """Numbers that a weight can have; where whole ones stand in their place, those are packed too."""
        return self.dtype in _FLOATS

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES.get(self.dtype, 1)


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
    with file.open("rb") as opened:
        start = opened.read(len(_LFS_POINTER))
    if start.startswith(_ZIP):
        import zipfile  # a tenth of what `plan` takes to start

        if not zipfile.is_zipfile(file):
            raise BrokenWeights(f"{file.name}: the file ends too early")
    elif not start.startswith(_PICKLE):
        raise BrokenWeights(f"{file.name}: {_what_it_is(start) or 'it is no file that torch.save writes'}")


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
    files = [folder / name for name in sorted({str(name) for name in _weight_map(index).values()})]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{index.name} names {', '.join(absent)}, which the folder does not hold")
    return files


def _weight_map(index: Path) -> dict[str, object]:
    """Tensor to file, as an index says it."""
    import json  # for folders with weights alone

    try:
        listed = json.loads(index.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise BrokenWeights(f"{index.name}: {error}") from error
    names = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(names, dict):
        raise BrokenWeights(f"{index.name} has no weight_map")
    if not names:
        raise BrokenWeights(f"{index.name} names no tensor")
    return names


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    header, data_bytes = _header(file)
    try:
        found = {
            key: StoredTensor(key=key, file=file, shape=tuple(map(int, part["shape"])), dtype=part["dtype"])
            for key, part in header.items()
        }
        needed = max((part["data_offsets"][1] for part in header.values()), default=0)
        problem = _size_problem(data_bytes - needed)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BrokenWeights(f"{file.name}: its header does not describe tensors") from error
    if problem:
        raise BrokenWeights(f"{file.name}: {problem}")
    return found


def _size_problem(surplus_bytes: int) -> str:
    if surplus_bytes < 0:
        return f"the file ends too early: {-surplus_bytes:,} bytes are not there"
    return f"{surplus_bytes:,} bytes follow the last tensor" if surplus_bytes else ""


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file, and how many bytes follow."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES:
            raise BrokenWeights(f"{file.name}: the file ends too early")
        if length > _MAX_HEADER_BYTES:
            start += opened.read(len(_LFS_POINTER))
            raise BrokenWeights(f"{file.name}: {_what_it_is(start) or 'it is no safetensors file'}")
        if length > size - _LENGTH_BYTES:
            raise BrokenWeights(f"{file.name}: the file ends too early")
        text = opened.read(length)
    import json

    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenWeights(f"{file.name}: its header is not JSON") from error
    if not isinstance(header, dict):
        raise BrokenWeights(f"{file.name}: its header does not describe tensors")
    header.pop("__metadata__", None)
    return header, size - _LENGTH_BYTES - length


def _what_it_is(start: bytes) -> str:
    if start.startswith(_LFS_POINTER):
        return "it stands for a file that Git LFS keeps elsewhere (git lfs pull fetches it)"
    return ""
