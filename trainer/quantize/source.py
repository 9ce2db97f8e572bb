"""The model that is to be packed: a folder as transformers saves it, read and checked, no number of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from msgspec import Struct

from llmtop.presets import catalog
from llmtop.presets.catalog import LoadedModel
from llmtop.presets.errors import LlmtopError, PackedWeightsError, UsageError
from llmtop.presets.spec import ModelShape
from llmtop.presets.tensorfile import DTYPE_BYTES, BrokenWeights, read_header
from llmtop.presets.weightfiles import safetensors_files

_GIVE = "give a folder with config.json and safetensors, as save_pretrained makes it"
_UNPACKED = "give the folder or the run that they came from, with 16- or 32-bit weights"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class SourceTensor(Struct, frozen=True, kw_only=True):
    """One tensor of the folder's files."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """In the words of safetensors."""
    start_byte: int
    """Where its numbers begin in the file."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


class Source(Struct, frozen=True, kw_only=True):
    folder: Path
    shape: ModelShape
    config: dict[str, Any]
    """Of config.json, in today's spelling."""
    tensors: dict[str, SourceTensor]

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors.values())


def read_source(folder: Path) -> Source:
    """Raises UsageError for what is no folder of plain weights, LlmtopError for files that are broken."""
    if not folder.is_dir():
        if folder.exists():
            raise UsageError(f"{folder}: it is a file, not a folder", fix=_GIVE)
        raise UsageError(f"{folder}: no such folder", fix=_GIVE)
    loaded = _load_model(folder)
    try:
        files = safetensors_files(folder)
        tensors = {tensor.key: tensor for file in files for tensor in _tensors_of(file)}
    except (BrokenWeights, OSError) as error:
        raise LlmtopError(
            f"the weights in {folder} are broken or cut short",
            why=str(error),
            fix="copy or download it again",
        ) from error
    if not tensors:
        raise UsageError(
            f"{folder}: holds no safetensors files",
            why="other forms, as pytorch_model.bin, cannot be read tensor by tensor",
            fix="save it anew: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)",
        )
    packed = [key for key, tensor in tensors.items() if tensor.dtype not in FLOATS]
    if packed:
        raise UsageError(
            f"{folder}: its weights are packed already",
            why=f"{packed[0]} is kept as {tensors[packed[0]].dtype}, which means nothing without its scales",
            fix=_UNPACKED,
        )
    return Source(folder=folder, shape=loaded.shape, config=loaded.hf_config, tensors=tensors)


def _load_model(folder: Path) -> LoadedModel:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: holds no config.json", fix=_GIVE)
    try:
        return catalog.load_model(str(folder.resolve()))
    except PackedWeightsError as packed:
        raise UsageError(
            f"{folder}: its weights are packed already",
            why=f"{packed.method or 'something that config.json does not name'} has rounded them, and what is"
            " rounded again loses twice",
            fix=_UNPACKED,
        ) from packed


def _tensors_of(file: Path) -> list[SourceTensor]:
    header = read_header(file)
    return [
        SourceTensor(
            key=key,
            file=file,
            shape=entry.shape,
            dtype=entry.dtype,
            start_byte=header.data_at + entry.data_offsets[0],
        )
        for key, entry in header.entries.items()
    ]
