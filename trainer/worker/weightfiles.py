"""The safetensors files of a folder of weights: which tensors they hold, without reading one."""

from __future__ import annotations

import json
import math
from pathlib import Path

from msgspec import Struct

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
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

    Raises OSError for one that the index names and that is not there, JSONDecodeError for a broken index.
    """
    index = folder / _INDEX
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    names = _weight_map(index)
    files = [folder / name for name in sorted({str(name) for name in names.values()})]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{index.name} names {', '.join(absent)}, which the folder does not hold")
    return files


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Key to tensor, over all files. Raises SafetensorError, with its name, for a file that is broken."""
    from safetensors import SafetensorError

    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            found.update(_tensors_of(file))
        except SafetensorError as error:
            raise SafetensorError(f"{file.name}: {error}") from error
    return found


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    from safetensors import safe_open

    found = {}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - not a dictionary
            part = opened.get_slice(key)
            shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
            found[key] = StoredTensor(key=key, file=file, shape=shape, dtype=dtype)
    return found


def _weight_map(index: Path) -> dict[str, object]:
    """Tensor to file, as an index says it."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(f"{index.name}: {error.msg}", error.doc, error.pos) from error
    names = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(names, dict):
        raise json.JSONDecodeError(f"{index.name} has no weight_map", "", 0)
    if not names:
        raise json.JSONDecodeError(f"{index.name} names no tensor", "", 0)
    return names


def packed_weights(stored: dict[str, StoredTensor]) -> list[str]:
    """Those that need scales or tables beside them, as far as names and types tell without the model."""
    return [
        key
        for key, tensor in stored.items()
        if tensor.packed or (key.endswith(".weight") and not tensor.is_float)
    ]
