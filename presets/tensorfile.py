"""The header of a safetensors file: which tensors it holds and where, checked before anything is made of it.

The form is that of safetensors 0.8 (its README, "Format"): eight bytes with the length of the header, the
header as JSON, then the numbers of all tensors.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import decode_json, open_regular

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
DTYPE_BYTES: dict[str, int] = {
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
_METADATA = "__metadata__"
_MOST_ELEMENTS = 1 << 53
_LFS_POINTER = b"version https://git-lfs"
_NO_TENSORS = "its header does not describe tensors"


class BrokenWeights(Exception):
    """Which file of the weights cannot be used and why, in words."""


class Entry(Struct, frozen=True, gc=False):
    """One tensor, as the header tells of it."""

    dtype: str
    """In the words of safetensors: F32, BF16, ..."""
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """First byte and the one behind the last, counted from the end of the header."""


class Header(Struct, frozen=True):
    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_at: int
    """Byte of the file at which the numbers begin."""


def read_header(file: Path) -> Header:
    """Raises BrokenWeights, which names the file, for one that is not whole or no such file; OSError."""
    try:
        text, size = _text(file)
        header = _decoded(text, size)
    except _Problem as problem:
        raise BrokenWeights(f"{file.name}: {problem}") from problem.__cause__
    return header


def what_it_is(start: bytes) -> str:
    """What a file is that begins so, where that is known and it is none of weights; else empty."""
    if start.startswith(_LFS_POINTER):
        return "it stands for a file that Git LFS keeps elsewhere (git lfs pull fetches it)"
    return ""


class _Problem(Exception):
    """What is wrong with the file that is being read."""


def _text(file: Path) -> tuple[bytes, int]:
    """The header's JSON, and the size of the file."""
    descriptor = open_regular(file)
    try:
        size = os.fstat(descriptor).st_size
        start = os.pread(descriptor, LENGTH_BYTES + len(_LFS_POINTER), 0)
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if len(start) < LENGTH_BYTES:
            raise _Problem("the file ends too early")
        if length > MAX_HEADER_BYTES:
            raise _Problem(what_it_is(start) or "it is no safetensors file")
        if length > size - LENGTH_BYTES:
            raise _Problem("the file ends too early")
        return os.pread(descriptor, length, LENGTH_BYTES), size
    finally:
        os.close(descriptor)


def _decoded(text: bytes, size: int) -> Header:
    try:
        parts = decode_json(text, dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise _Problem(_NO_TENSORS) from error
    except msgspec.DecodeError as error:
        raise _Problem("its header is not JSON") from error
    data_at = LENGTH_BYTES + len(text)
    try:
        notes = parts.pop(_METADATA, None)
        metadata = {} if notes is None else decode_json(notes, dict[str, str])
        entries = {key: decode_json(raw, Entry) for key, raw in parts.items()}
    except msgspec.DecodeError as error:
        raise _Problem(_NO_TENSORS) from error
    surplus = size - data_at - max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if surplus < 0:
        raise _Problem(f"the file ends too early: {-surplus:,} bytes are not there")
    if surplus:
        raise _Problem(f"{surplus:,} bytes follow the last tensor")
    if not all(map(_can_be, entries.values())):
        raise _Problem(_NO_TENSORS)
    return Header(entries, metadata, data_at)


def _can_be(entry: Entry) -> bool:
    """Whether it is as large as it says: who makes a tensor of it takes no more memory than the file has."""
    begin, end = entry.data_offsets
    if not 0 <= begin <= end or any(not 0 <= length <= _MOST_ELEMENTS for length in entry.shape):
        return False
    elements = math.prod(entry.shape)
    width = DTYPE_BYTES.get(entry.dtype)
    return elements <= _MOST_ELEMENTS if width is None else elements * width == end - begin
