"""Puts a saved state into a fresh engine of any ZeRO stage and world size: each rank reads what it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.units import counted
from llmtop.trainer.statefile import (
    ABSMAX,
    BLOCK_ELEMENTS,
    CODES,
    MASTER,
    MOMENTS,
    QMAP,
    VALUE,
    StoredParameter,
)
from llmtop.trainer.worker.state import extras, moments
from llmtop.trainer.worker.state.finding import Found, Stored, same_layout
from llmtop.trainer.worker.state.layout import Layout, Slab, flat, frozen_piece
from llmtop.trainer.worker.state.names import Named, frozen, frozen_check, persistent_buffers
from llmtop.trainer.worker.state.saving import random_of, shard_name
from llmtop.trainer.worker.state.shardfile import DTYPES

_PACKED_ANEW = "8-bit moments were packed anew: their blocks begin elsewhere in this layout"
_PACKED = "the moments, which were kept in full, were packed to 8 bits"
_NARROWED = "the master weights were rounded to {}"
_STEPS = "weights that were updated less often than others count as many updates as those now"
_OTHER_FORM = "the weights under the adapters were {}, and are {} now"
_RANDOM_ANEW = "{} begin with random states of their own: the state is of {}"


class Filled(Struct, frozen=True, kw_only=True):
    bytes_read: int
    notes: tuple[str, ...]
    """In words what is not exactly as it was saved."""


class Filler:
    """One rank's part of a load, in the order in which it must be done."""

    def __init__(self, engine: Any, stored: Stored, layout: Layout, named: Sequence[Named]) -> None:
        self._engine = engine
        self._stored = stored
        self._layout = layout
        self._named = list(named)
        self._names = {one.number: one.name for one in named}
        self._bytes = 0
        self._notes: list[str] = []

    def check(self, *, only_trainable: bool) -> None:
        """Local, and before anything is changed. LlmtopError when the state is not of this model."""
        index = self._stored.index
        for one in self._named:
            if id(one.parameter) in self._layout.group_of or not only_trainable or self._has(one):
                self._check_parameter(one, self._stored.parameter(one.number))
        groups = self._engine.basic_optimizer.param_groups
        self._saved_groups()
        if index.scheduler is not None and len(groups) != len(index.groups):
            raise LlmtopError(
                "the training state belongs to other parameter groups",
                why=f"it has {counted(len(index.groups), 'group')}, this run {counted(len(groups), 'group')}",
                fix="go on with the weight decay that it was saved with",
            )
        if only_trainable and int(self._engine.global_rank) == 0:
            self._check_frozen(index.frozen_check)

    def fill(self) -> None:
        """Local: master weights, moments, frozen weights and buffers."""
        with torch.no_grad():
            for slab in self._layout.slabs:
                self._fill_slab(slab)
            for one in frozen(self._named, set(self._layout.group_of)):
                if self._has(one):
                    self._fill_frozen(one)
            self._fill_buffers()

    def refresh(self) -> None:
        """Collective: the model's weights follow the master weights."""
        self._layout.refresh()

    def finish(self) -> Filled:
        """Local: what is plain, and random states last of all, since loading may have drawn from them."""
        engine, index = self._engine, self._stored.index
        for group, saved in self._saved_groups():
            extras.restore_hyper_parameters(group, saved)
        if engine.lr_scheduler is not None and index.scheduler is not None:
            engine.lr_scheduler.load_state_dict(index.scheduler)
        extras.restore_loss_scale(self._layout.loss_scaler, index.loss_scale)
        extras.restore_counters(engine, index.counters)
        self._restore_random()
        return Filled(bytes_read=self._bytes, notes=tuple(dict.fromkeys(self._notes)))

    def _has(self, one: Named) -> bool:
        stored = self._stored.parameter(one.number)
        return stored is not None and stored.saved

    def _check_parameter(self, one: Named, stored: StoredParameter | None) -> None:
        if stored is None or not stored.saved:
            raise LlmtopError(
                f"the training state has no {one.name}",
                why=self._stored.index.left_out or "it was made of another model",
                fix="go on with the model and adapters that it was saved with",
            )
        if stored.shape != one.shape:
            raise LlmtopError(
                f"the training state has {one.name} of shape {stored.shape}",
                why=f"in this model it is {one.shape}",
                fix="go on with the model and adapters that it was saved with",
            )

    def _check_frozen(self, saved: str) -> None:
        now = frozen_check(self._named)
        if not saved or not now or now == saved:
            return
        form, _, _ = now.partition(":")
        before, _, _ = saved.partition(":")
        if form != before:
            self._notes.append(_OTHER_FORM.format(before, form))
            return
        raise LlmtopError(
            "the weights under the adapters are not those that the adapters were trained on",
            why="they are no part of the training state, and this run was made with others",
            fix="go on from the same folder of weights, in the same precision and quantization",
        )

    def _saved_groups(self) -> list[tuple[dict[str, Any], extras.Plain]]:
        """Each group of every optimizer here with the hyper-parameters that its parameters had."""
        saved = self._stored.index.groups
        found = []
        owners = {id(slab.owner): slab.owner for slab in self._layout.slabs}
        owners[id(self._engine.basic_optimizer)] = self._engine.basic_optimizer
        for owner in owners.values():
            for number, group in enumerate(owner.param_groups):
                names = [one for one in self._named if self._layout.group_of.get(id(one.parameter)) == number]
                were = {
                    stored.group
                    for one in names
                    if (stored := self._stored.parameter(one.number)) is not None and stored.group is not None
                }
                sets = [saved[one] for one in sorted(were)]
                if any(one != sets[0] for one in sets):
                    raise LlmtopError(
                        "the training state has other parameter groups",
                        why="parameters of one group here had different hyper-parameters",
                        fix="go on with the weight decay that it was saved with",
                    )
                if sets:
                    found.append((group, sets[0]))
        return found

    def _fill_slab(self, slab: Slab) -> None:
        found = self._stored.find(slab.pieces, self._names.__getitem__)
        narrow = slab.master.dtype != torch.float32
        if narrow and any(DTYPES[one.slab.tensors[_master_of(one)]] == torch.float32 for one in found):
            self._notes.append(_NARROWED.format(str(slab.master.dtype).removeprefix("torch.")))
        self._read(found, slab.flat, _master_of)
        steps = self._stored.steps(slab.pieces)
        if not steps:
            return
        if len(steps) > 1:
            self._notes.append(_STEPS)
        made = moments.make(slab, max(steps))
        same = same_layout(slab.pieces, slab.flat.numel(), found)
        for moment in MOMENTS:
            if moment in made:
                self._read_moment(found, flat(made[moment]), moment)
            elif same and f"{moment}.{CODES}" in found[0].slab.tensors:
                self._copy_packed(found[0], made, moment)
            else:
                was_packed = any(f"{moment}.{CODES}" in one.slab.tensors for one in found)
                self._notes.append(_PACKED_ANEW if was_packed else _PACKED)
                values = torch.zeros(slab.flat.numel(), dtype=torch.float32)
                self._read_moment(found, values, moment)
                codes, absmax, qmap = (made[f"{moment}.{end}"] for end in (CODES, ABSMAX, QMAP))
                moments.pack(values, codes, absmax, qmap)

    def _read(self, found: Sequence[Found], target: torch.Tensor, ending_of: Callable[[Found], str]) -> None:
        ranges: dict[str, list[tuple[str, int, torch.Tensor]]] = {}
        for one in found:
            where = target[one.target : one.target + one.count]
            ranges.setdefault(one.file, []).append((f"{one.slab.key}.{ending_of(one)}", one.source, where))
        for file, wanted in ranges.items():
            self._bytes += self._stored.reader(file).read_all(wanted)

    def _read_moment(self, found: Sequence[Found], target: torch.Tensor, moment: str) -> None:
        """What was never updated has none in the state, and stays zero as in a fresh optimizer."""
        self._read([one for one in found if moment in one.slab.tensors], target, lambda one: moment)
        for one in found:
            if f"{moment}.{CODES}" not in one.slab.tensors:
                continue
            for start in range(0, one.count, moments.PART_ELEMENTS):
                count = min(moments.PART_ELEMENTS, one.count - start)
                values = self._unpacked(one, moment, one.source + start, count)
                target[one.target + start : one.target + start + count].copy_(values)

    def _unpacked(self, one: Found, moment: str, start: int, count: int) -> torch.Tensor:
        reader, key = self._stored.reader(one.file), f"{one.slab.key}.{moment}"
        first = start // BLOCK_ELEMENTS
        codes = torch.empty(count, dtype=torch.uint8)
        absmax = torch.empty(-(-(start + count) // BLOCK_ELEMENTS) - first, dtype=torch.float32)
        wanted = [(f"{key}.{CODES}", start, codes), (f"{key}.{ABSMAX}", first, absmax)]
        self._bytes += reader.read_all(wanted)
        return moments.unpack(codes, absmax, reader.tensor(f"{key}.{QMAP}"), start)

    def _copy_packed(self, one: Found, made: moments.Tensors, moment: str) -> None:
        endings = [f"{moment}.{end}" for end in (CODES, ABSMAX, QMAP)]
        wanted = [(f"{one.slab.key}.{ending}", 0, flat(made[ending])) for ending in endings]
        self._bytes += self._stored.reader(one.file).read_all(wanted)

    def _fill_frozen(self, one: Named) -> None:
        piece = frozen_piece(one)
        if not piece.count:
            return
        held = getattr(one.parameter, "ds_tensor", one.parameter).detach().view(-1)
        if held.numel() < piece.count:
            raise LlmtopError(
                f"{one.name} cannot be loaded",
                why="it is not trained, and lies in a swap file of DeepSpeed",
                fix="use --offload-param cpu or none",
            )
        found = self._stored.find([piece], self._names.__getitem__)
        self._read(found, held, _value_of)
        if getattr(one.parameter, "ds_secondary_tensor", None) is not None:
            # Of hpZ: made again from the part that was just filled.
            one.parameter.ds_secondary_tensor = None

    def _fill_buffers(self) -> None:
        saved = {buffer.name: buffer for buffer in self._stored.index.buffers}
        for name, buffer in persistent_buffers(self._engine.module).items():
            stored = saved.get(name)
            if stored is None or stored.shape != tuple(buffer.shape):
                raise LlmtopError(
                    f"the training state has no buffer {name} of this shape",
                    why="it was made of another model",
                    fix="go on with the model that it was saved with",
                )
            values = self._stored.reader(stored.file).tensor(f"buffer.{name}")
            buffer.copy_(values.view(buffer.shape))
            self._bytes += values.nbytes

    def _restore_random(self) -> None:
        index, rank = self._stored.index, int(self._engine.global_rank)
        if rank < index.source.world_size:
            tensors, plain = random_of(self._stored.reader(shard_name(rank)))
            extras.restore_random(tensors, plain, self._engine.device)
        if index.source.world_size < int(self._engine.world_size):
            new = int(self._engine.world_size) - index.source.world_size
            self._notes.append(
                _RANDOM_ANEW.format(counted(new, "rank"), counted(index.source.world_size, "rank"))
            )


def _master_of(one: Found) -> str:
    return MASTER if MASTER in one.slab.tensors else VALUE


def _value_of(one: Found) -> str:
    return VALUE if VALUE in one.slab.tensors else MASTER
