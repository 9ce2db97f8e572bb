"""Writes the state of a run: every rank its share into a file of its own, then rank 0 the index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from llmtop.presets.version import package_versions
from llmtop.trainer.statefile import (
    MASTER,
    VALUE,
    Piece,
    Source,
    StateIndex,
    StoredBuffer,
    StoredFile,
    StoredParameter,
    StoredSlab,
)
from llmtop.trainer.worker.state import extras, moments
from llmtop.trainer.worker.state.layout import Layout, Slab, StateRefused, flat, frozen_piece, layout_of
from llmtop.trainer.worker.state.names import (
    Named,
    frozen,
    frozen_check,
    named_parameters,
    persistent_buffers,
)
from llmtop.trainer.worker.state.shardfile import DTYPE_NAMES, ShardReader, header_of, write_shard

_SLABS, _RANDOM = "llmtop_slabs", "llmtop_random"
"""Keys of a file's metadata."""
_LEFT_OUT = "weights that are not trained: they come from the model's own folder, or from the run's seed"
_VERSIONED = ("torch", "deepspeed", "transformers", "peft", "bitsandbytes")


class Share(Struct, frozen=True, kw_only=True, eq=False):
    """What one rank writes."""

    slabs: tuple[StoredSlab, ...]
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @property
    def size_bytes(self) -> int:
        head, _ = header_of(self.tensors, self.metadata)
        return len(head) + sum(tensor.nbytes for tensor in self.tensors.values())


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def share_of(engine: Any, *, only_trainable: bool) -> Share:
    """Local: nothing is copied yet. Raises StateRefused for a run whose state cannot be saved."""
    named = named_parameters(engine.module)
    layout = layout_of(engine, named)
    for owner in {id(slab.owner): slab.owner for slab in layout.slabs}.values():
        moments.refuse_unknown_optimizer(owner)
    rank, ranks = int(engine.global_rank), int(engine.world_size)
    slabs: list[StoredSlab] = []
    tensors: dict[str, torch.Tensor] = {}
    for slab, held in _shares(engine, layout, named, rank, ranks, only_trainable=only_trainable):
        slabs.append(slab)
        tensors |= {f"{slab.key}.{ending}": tensor for ending, tensor in held.items()}
    if rank == 0:
        tensors |= {f"buffer.{name}": one for name, one in _flat_buffers(engine).items()}
    random_tensors, random_plain = extras.random_tensors(engine.device)
    return Share(
        slabs=tuple(slabs),
        tensors={**tensors, **random_tensors},
        metadata={
            _SLABS: msgspec.json.encode(slabs).decode(),
            _RANDOM: json.dumps(random_plain),
        },
    )


def write_share(share: Share, folder: Path, rank: int, *, durable: bool) -> None:
    """Raises OSError."""
    write_shard(folder / shard_name(rank), share.tensors, share.metadata, durable=durable)


def random_of(reader: ShardReader) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    names = [name for name in ("rng.torch", "rng.numpy", "rng.python", "rng.cuda") if name in reader]
    return {name: reader.tensor(name) for name in names}, json.loads(reader.metadata[_RANDOM])


def make_index(engine: Any, folder: Path, step: int, *, only_trainable: bool) -> StateIndex:
    """On rank 0, when all files are written: what they say of themselves, and what all ranks have alike."""
    named = named_parameters(engine.module)
    layout = layout_of(engine, named)
    files = [_stored_file(folder / shard_name(rank)) for rank in range(int(engine.world_size))]
    saved = {piece.parameter for file in files for slab in file.slabs for piece in slab.pieces}
    return StateIndex(
        step=step,
        source=Source(
            zero=int(engine.zero_optimization_stage()),
            world_size=int(engine.world_size),
            engine_optimizer=type(engine.optimizer).__name__,
            optimizer=type(engine.basic_optimizer).__name__,
            versions=package_versions(_VERSIONED),
        ),
        parameters=tuple(
            StoredParameter(
                name=one.name,
                shape=one.shape,
                dtype=DTYPE_NAMES.get(one.parameter.dtype, str(one.parameter.dtype)),
                trainable=id(one.parameter) in layout.group_of,
                saved=one.number in saved,
                aliases=one.aliases,
                group=layout.group_of.get(id(one.parameter)),
            )
            for one in named
        ),
        buffers=tuple(
            StoredBuffer(
                name=name, shape=tuple(buffer.shape), dtype=DTYPE_NAMES[buffer.dtype], file=shard_name(0)
            )
            for name, buffer in persistent_buffers(engine.module).items()
        ),
        groups=tuple(extras.hyper_parameters(group) for group in engine.basic_optimizer.param_groups),
        scheduler=extras.schedule(engine),
        loss_scale=extras.loss_scale(layout.loss_scaler),
        counters=extras.counters(engine),
        files=tuple(files),
        left_out=_LEFT_OUT if only_trainable and len(layout.group_of) < len(named) else "",
        frozen_check=frozen_check(named) if only_trainable else "",
    )


def _shares(
    engine: Any, layout: Layout, named: list[Named], rank: int, ranks: int, *, only_trainable: bool
) -> Iterator[tuple[StoredSlab, dict[str, torch.Tensor]]]:
    steps: dict[int, float] = {}
    states: list[moments.Tensors] = []
    for slab in layout.slabs:
        tensors, step = moments.held(slab)
        states.append({MASTER: slab.master.detach(), **tensors})
        if step is not None:
            steps[id(slab.master)] = step
    for number, (slab, tensors) in enumerate(zip(layout.slabs, states, strict=True)):
        step = moments.common_step(slab, steps)
        cut = _part(slab, tensors, number, rank, ranks)
        if cut is not None:
            yield _stored(f"{number:05d}", cut[0], cut[1], step=step, whole=cut[2])
    if only_trainable:
        return
    for one in frozen(named, set(layout.group_of)):
        held = _frozen_part(one, rank, ranks)
        if held is not None:
            yield _stored(f"frozen{one.number:05d}", (held[0],), {VALUE: held[1]}, step=None, whole=False)


def _part(
    slab: Slab, tensors: moments.Tensors, number: int, rank: int, ranks: int
) -> tuple[tuple[Piece, ...], moments.Tensors, bool] | None:
    """This rank's share: what all ranks have whole is cut among them, or goes to one when it is packed."""
    flats = {ending: flat(tensor) for ending, tensor in tensors.items()}
    if not slab.pieces:
        return None
    if not slab.replicated:
        return slab.pieces, flats, True
    if any("." in ending for ending in flats):
        return (slab.pieces, flats, True) if number % ranks == rank else None
    first, count = _range(slab.flat.numel(), rank, ranks)
    pieces = tuple(_within(slab.pieces, first, count))
    if not pieces:
        return None
    return pieces, {name: one[first : first + count] for name, one in flats.items()}, ranks == 1


def _frozen_part(one: Named, rank: int, ranks: int) -> tuple[Piece, torch.Tensor] | None:
    parameter = one.parameter
    shard = getattr(parameter, "ds_tensor", None)
    if hasattr(parameter, "quant_state") or hasattr(shard, "ds_quant_scale"):
        raise StateRefused(
            f"{one.name} cannot be saved", why="it is packed, and its scales are not part of a training state"
        )
    piece = frozen_piece(one)
    values = getattr(parameter, "ds_tensor", parameter).detach().view(-1)
    if values.numel() < piece.count:
        raise StateRefused(
            f"{one.name} cannot be saved",
            why="it is not trained, and lies in a swap file of DeepSpeed",
            fix="use --offload-param cpu or none",
        )
    if hasattr(parameter, "ds_tensor"):
        return (piece, values[: piece.count]) if piece.count else None
    first, count = _range(piece.count, rank, ranks)
    if not count:
        return None
    return Piece(one.number, first, count, 0), values[first : first + count]


def _range(elements: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part of a rank in what all of them have."""
    size = -(-elements // ranks)
    first = min(rank * size, elements)
    return first, min(size, elements - first)


def _within(pieces: tuple[Piece, ...], first: int, count: int) -> Iterator[Piece]:
    for piece in pieces:
        low = max(piece.offset, first)
        high = min(piece.offset + piece.count, first + count)
        if low < high:
            yield Piece(piece.parameter, piece.start + low - piece.offset, high - low, low - first)


def _stored(
    key: str, pieces: tuple[Piece, ...], tensors: moments.Tensors, *, step: float | None, whole: bool
) -> tuple[StoredSlab, moments.Tensors]:
    elements = tensors[MASTER if MASTER in tensors else VALUE].numel()
    kinds = {ending: DTYPE_NAMES[tensor.dtype] for ending, tensor in tensors.items()}
    slab = StoredSlab(key=key, elements=elements, pieces=pieces, tensors=kinds, step=step, whole=whole)
    return slab, tensors


def _stored_file(path: Path) -> StoredFile:
    reader = ShardReader(path)
    try:
        slabs = msgspec.json.decode(reader.metadata[_SLABS], type=tuple[StoredSlab, ...])
    finally:
        reader.close()
    return StoredFile(name=path.name, size_bytes=path.stat().st_size, slabs=slabs)


def _flat_buffers(engine: Any) -> dict[str, torch.Tensor]:
    buffers = persistent_buffers(engine.module)
    return {name: buffer.detach().contiguous().view(-1) for name, buffer in buffers.items()}
