"""Numbers of a safetensors file in pieces of some MB, as 32-bit floats; no file is mapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
from numpy.typing import NDArray

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.quantize.source import SourceTensor

Floats = NDArray[numpy.float32]
PIECE_BYTES = 4 << 20
"""Of a piece as 32-bit floats."""
_READ_AS: dict[str, Any] = {
    "F64": numpy.dtype("<f8"),
    "F32": numpy.dtype("<f4"),
    "F16": numpy.dtype("<f2"),
    "BF16": numpy.dtype("<u2"),
}


def pieces(tensor: SourceTensor, heads: int = 0) -> Iterator[Floats]:
    """Whole rows in their order; with `heads`, whole heads, whose rows have changed places."""
    rows = tensor.shape[0] if tensor.shape else 1
    width = tensor.elements // rows if rows else 0
    if not width:
        return
    unit = rows // heads if heads else 1
    at_a_time = max(1, PIECE_BYTES // (4 * width * unit)) * unit
    dtype = _READ_AS[tensor.dtype]
    with tensor.file.open("rb") as file:
        for first in range(0, rows, at_a_time):
            count = min(at_a_time, rows - first)
            file.seek(tensor.start_byte + first * width * dtype.itemsize)
            read = numpy.fromfile(file, dtype, count * width)
            if read.size != count * width:
                raise LlmtopError(
                    f"{tensor.file} has become shorter while it was read", fix="copy or download it again"
                )
            floats = as_floats(read, tensor.dtype).reshape(count, width)
            yield interleaved(floats, unit) if heads else floats


def as_floats(read: NDArray[Any], dtype: str) -> Floats:
    if dtype == "BF16":
        return (read.astype(numpy.uint32) << 16).view(numpy.float32)
    return read.astype(numpy.float32, copy=False)


def interleaved(rows: Floats, head_rows: int) -> Floats:
    """Rows of each head: the first of its one half, the first of the other, the second of the one, ...

    llama.cpp turns neighbours by an angle where transformers turns halves (`conversion/llama.py:permute`).
    """
    by_half = rows.reshape(-1, 2, head_rows // 2, *rows.shape[1:])
    return numpy.ascontiguousarray(by_half.swapaxes(1, 2)).reshape(rows.shape)


def in_halves(rows: Floats, head_rows: int) -> Floats:
    """The way back."""
    by_pair = rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:])
    return numpy.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(rows.shape)
