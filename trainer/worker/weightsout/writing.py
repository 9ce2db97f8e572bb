"""Writes tensors as safetensors files that Transformers reads, one block of the model at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.worker.state.shardfile import ShardWriter
from llmtop.trainer.worker.weightsout.statetensors import Tensors

SINGLE = "model.safetensors"
ADAPTERS = "adapter_model.safetensors"
_METADATA = {"format": "pt"}
_BLOCK = re.compile(r"(.*?\.\d+)\.")

Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Packing(Protocol):
    """Tensors by themselves in fewer bits."""

    def __call__(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...

    def metadata(self) -> dict[str, str]:
        """Of the files, once all tensors have been seen."""


class Written(Struct, frozen=True, kw_only=True):
    tensors: int
    parameters: int
    size_bytes: int


class _Group(Struct, frozen=True, kw_only=True, eq=False):
    """Tensors that are read together, and what comes of them in the files."""

    names: tuple[str, ...]
    outcome: dict[str, torch.Tensor]
    """Without memory."""


def write_weights(
    folder: Path,
    tensors: Tensors,
    dtype: torch.dtype,
    *,
    shard_bytes: int,
    revert: Revert | None,
    on_progress: Callable[[int, int], None],
    single: str = SINGLE,
    packing: Packing | None = None,
) -> Written:
    """Files of at most `shard_bytes` and their index; one file alone is called `single`.

    `revert` gives tensors the names and shapes that files of this family have, where those are others;
    `packing` then puts those that it means into fewer bits.
    """
    changed = _both(revert, packing)
    groups = list(_groups(tensors, dtype, changed, whole_blocks=revert is not None))
    metadata = {**_METADATA, **(packing.metadata() if packing is not None else {})}
    shards = _shards(groups, shard_bytes)
    names = [_shard_name(single, number, len(shards)) for number in range(1, len(shards) + 1)]
    total = sum(_bytes(group) for group in groups)
    done = 0
    for name, shard in zip(names, shards, strict=True):
        promised = {key: empty for group in shard for key, empty in group.outcome.items()}
        writer = ShardWriter(folder / name, promised, metadata)
        for group in shard:
            for key, values in _read(group, tensors, dtype, changed).items():
                writer.write(key, values)
            done += _bytes(group)
            on_progress(done, total)
        writer.close()
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if len(shards) > 1:
        _write_index(folder / f"{single}.index.json", names, shards, total, elements)
    size = sum((folder / name).stat().st_size for name in names)
    return Written(tensors=sum(len(group.outcome) for group in groups), parameters=elements, size_bytes=size)


def _both(revert: Revert | None, packing: Packing | None) -> Revert | None:
    if revert is None or packing is None:
        return packing if revert is None else revert
    return lambda tensors: packing(revert(tensors))


def _groups(
    tensors: Tensors, dtype: torch.dtype, changed: Revert | None, *, whole_blocks: bool
) -> Iterator[_Group]:
    """Each tensor for itself, but a block together where tensors are merged or split."""
    together: dict[str, list[str]] = {}
    for name in tensors:
        match = _BLOCK.match(name)
        key = match.group(1) if whole_blocks and match else name
        together.setdefault(key, []).append(name)
    for names in together.values():
        empty = {
            name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype or dtype, device="meta")
            for name in names
        }
        yield _Group(names=tuple(names), outcome=changed(empty) if changed is not None else empty)


def _read(
    group: _Group, tensors: Tensors, dtype: torch.dtype, changed: Revert | None
) -> dict[str, torch.Tensor]:
    values = {}
    for name in group.names:
        values[name] = tensors[name].read(tensors[name].dtype or dtype)
        if dtype == torch.float16 and bool(torch.isinf(values[name]).any()):
            raise LlmtopError(
                f"{name} has numbers beyond the range of fp16",
                why="fp16 ends at 65,504",
                fix="--dtype bf16, or --dtype fp32",
            )
    return changed(values) if changed is not None else values


def _bytes(group: _Group) -> int:
    return sum(empty.nbytes for empty in group.outcome.values())


def _shards(groups: list[_Group], shard_bytes: int) -> list[list[_Group]]:
    shards: list[list[_Group]] = [[]]
    held = 0
    for group in groups:
        size = _bytes(group)
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(group)
        held += size
    return shards


def _shard_name(single: str, number: int, count: int) -> str:
    if count == 1:
        return single
    stem, _, ending = single.rpartition(".")
    return f"{stem}-{number:05d}-of-{count:05d}.{ending}"


def _write_index(path: Path, names: list[str], shards: list[list[_Group]], total: int, elements: int) -> None:
    places: dict[str, Any] = {
        key: name
        for name, shard in zip(names, shards, strict=True)
        for group in shard
        for key in group.outcome
    }
    index = {"metadata": {"total_parameters": elements, "total_size": total}, "weight_map": places}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
