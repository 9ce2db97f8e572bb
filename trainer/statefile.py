"""What a saved training state holds, told by its index without torch and without reading a tensor.

A state is a folder `step-N`:
    rank-NNNNN.safetensors   what one rank wrote: pieces of the optimizer's tensors, frozen weights, buffers
    index.json               this module's `StateIndex`: parameters by name, and where each piece of them lies
    llmtop.json              the marker, written last: step, position in the data, the size of every file
A piece is a run of a parameter's elements, counted flat; all pieces of a parameter cover it exactly once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.presets.foreign import read_json, why_unreadable

INDEX = "index.json"
MARKER = "llmtop.json"
FORMAT = 1
_MOST_INDEX_BYTES = 1 << 30
"""It grows with parameters and ranks."""
_TAG = re.compile(r"step-(\d+)(\.old)?")

MASTER = "master"
"""The weights as the optimizer keeps them, in fp32 unless the run asked for less."""
VALUE = "value"
"""A weight that is not trained, in the model's own type."""
MOMENTS = ("exp_avg", "exp_avg_sq")
CODES, ABSMAX, QMAP = "codes", "absmax", "qmap"
"""Of the three tensors of a moment in 8 bits (bitsandbytes): codes, scales of blocks, meaning of codes."""
BLOCK_ELEMENTS = 256
"""Elements that share one scale."""

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Types that a state is kept in, in the words of safetensors."""


class Piece(Struct, frozen=True, array_like=True):
    """A run of elements of one parameter inside a stored tensor."""

    parameter: int
    """Its place in `StateIndex.parameters`."""
    start: int
    count: int
    offset: int
    """Elements of the stored tensor before it."""


class StoredSlab(Struct, frozen=True, kw_only=True):
    """Tensors of one layout that a rank wrote: `KEY.master`, `KEY.exp_avg`, ..."""

    key: str
    elements: int
    pieces: tuple[Piece, ...]
    tensors: dict[str, str]
    """Ending to data type, in the words of safetensors."""
    step: float | None = None
    """Updates that the optimizer counts; None where it has no state."""
    whole: bool = True
    """Holds one whole tensor of the optimizer; what is packed to 8 bits always does."""

    @property
    def weights(self) -> str:
        """The key of the tensor that has the weights themselves."""
        return f"{self.key}.{MASTER if MASTER in self.tensors else VALUE}"


class StoredFile(Struct, frozen=True, kw_only=True):
    name: str
    size_bytes: int
    slabs: tuple[StoredSlab, ...]


class StoredParameter(Struct, frozen=True, kw_only=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    """In the model."""
    trainable: bool
    saved: bool
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor: tied weights are kept once."""
    group: int | None = None
    """Its place in `StateIndex.groups`."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class StoredBuffer(Struct, frozen=True, kw_only=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str


class Source(Struct, frozen=True, kw_only=True):
    """What wrote the state."""

    zero: int
    world_size: int
    engine_optimizer: str
    optimizer: str
    versions: dict[str, str] = {}


class StateIndex(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    step: int
    source: Source
    parameters: tuple[StoredParameter, ...]
    buffers: tuple[StoredBuffer, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    """Hyper-parameters of each parameter group."""
    scheduler: dict[str, Any] | None = None
    loss_scale: dict[str, Any] | None = None
    counters: dict[str, int] = {}
    files: tuple[StoredFile, ...] = ()
    left_out: str = ""
    """In words what is not in the state and where it comes from; empty when all of it is here."""
    frozen_check: str = ""
    """In which form the weights are that are left out, and a checksum of samples of them."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def stored_bytes(self) -> dict[str, int]:
        """Bytes by what they are: master weights, each moment, weights that are not trained."""
        totals: dict[str, int] = {}
        for file in self.files:
            for slab in file.slabs:
                for ending, dtype in slab.tensors.items():
                    kind, _, packed = ending.partition(".")
                    totals[kind] = totals.get(kind, 0) + DTYPE_BYTES[dtype] * _length(slab, packed)
        return totals


class Position(Struct, frozen=True, kw_only=True):
    """How far the whole job has read: the same for every rank and world size."""

    epoch: int = 0
    index: int = 0
    """Sequences of this epoch's order that are used up."""
    seq_len: int | None = None
    """Tokens of the sequences that were counted, where it was noted (a saved position has it)."""


class Progress(Struct, frozen=True, kw_only=True):
    """The marker of a complete checkpoint."""

    step: int
    position: Position
    world_size: int
    """Of the ranks that wrote it."""
    files: dict[str, int] = {}
    """Size of every other file of the checkpoint: one that is cut off does not count."""


def newest(folder: Path) -> Progress | None:
    """The furthest complete checkpoint in a folder."""
    found = [progress for path in folder.glob("step-*") if (progress := read_progress(path)) is not None]
    return max(found, key=lambda progress: progress.step, default=None)


def newest_in(folders: Iterable[Path]) -> tuple[Progress, Path] | None:
    """The furthest complete one of several folders, and which folder holds it; the first of equals."""
    found = [(progress, folder) for folder in folders if (progress := newest(folder)) is not None]
    return max(found, key=lambda one: one[0].step, default=None)


def read_progress(path: Path) -> Progress | None:
    """The marker of a state that is whole; None for any other folder."""
    if _TAG.fullmatch(path.name) is None:
        return None
    try:
        progress = read_json(path / MARKER, Progress)
        whole = all((path / name).stat().st_size == size for name, size in progress.files.items())
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    return progress if whole else None


def read_index(folder: Path) -> StateIndex:
    """The index of a `step-N` folder. Raises LlmtopError when there is none or it cannot be read."""
    path = folder / INDEX
    try:
        index = read_json(path, StateIndex, _MOST_INDEX_BYTES)
    except FileNotFoundError:
        raise LlmtopError(
            f"{folder} is not a training state that this version can read",
            why=f"it has no {INDEX}: an older version made it, or its writing was cut off",
            fix="start a new run, or use the version that made it",
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise LlmtopError(f"cannot read {path}", why=why_unreadable(error)) from error
    if problem := _problem(index):
        raise LlmtopError(
            f"cannot read {path}", why=problem, fix="start from another checkpoint, or a new run"
        )
    if index.format != FORMAT:
        raise LlmtopError(
            f"{folder} is a training state of format {index.format}",
            why=f"this version reads format {FORMAT}",
            fix="use the version of llmtop that made it",
        )
    return index


def _problem(index: StateIndex) -> str:
    """What an index says that no state can be; empty for a sound one."""
    slabs = [slab for file in index.files for slab in file.slabs]
    strange = {dtype for slab in slabs for dtype in slab.tensors.values()} - DTYPE_BYTES.keys()
    if strange:
        return f"no state is kept in the type {min(strange)!r}"
    if any(
        slab.elements < 0 or any(min(piece) < 0 for piece in map(_numbers, slab.pieces)) for slab in slabs
    ):
        return "a piece of a tensor has less than no elements, or begins before the first"
    if any(piece.parameter >= len(index.parameters) for slab in slabs for piece in slab.pieces):
        return "a piece belongs to no parameter"
    return ""


def _numbers(piece: Piece) -> tuple[int, int, int, int]:
    return piece.parameter, piece.start, piece.count, piece.offset


def _length(slab: StoredSlab, packed: str) -> int:
    if packed == ABSMAX:
        return -(-slab.elements // BLOCK_ELEMENTS)
    return 256 if packed == QMAP else slab.elements
