"""Where DeepSpeed 0.19.8 keeps the weights that a rank's optimizer steps on, wrapper by wrapper.

Every wrapper gives its inner optimizer flat tensors, here slabs; a slab is a row of pieces of parameters.
Read from (paths under `deepspeed/runtime`, version 0.19.8):

- `zero/stage_1_and_2.py:DeepSpeedZeroOptimizer.__init__`: parameters of a group one after the other at
  `round_robin_bit16_offsets`, the whole cut in equal parts by rank; `single_partition_of_fp32_groups` is this
  rank's part, in host memory with offload. The weights follow by `update_lp_params`.
- `zero/stage3.py:DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions`: every parameter is cut in equal
  parts by rank; `fp32_partitioned_groups_flat` holds this rank's parts of a sub-group (`fp16_groups`), which
  belongs to group `sub_group_to_group_id`. Sub-groups that stay on the GPU with `offload_optimizer.ratio` < 1
  are stepped by `backup_optimizer` (`_optimizer_step`). Optimizer state on NVMe is in files between steps
  (`optimizer_swapper`).
- `bf16_optimizer.py:BF16_Optimizer._setup_for_real_optimizer`: as stages 1 and 2, in
  `fp32_groups_flat_partition`.
- `fp16/fused_optimizer.py:FP16_Optimizer.__init__`: `fp32_groups_flat`, whole on every rank. Its constructor
  makes a first update with gradients of zero, so that its steps are one ahead and stay so.
- `fp16/unfused_optimizer.py:FP16_UnfusedOptimizer.__init__`: `fp32_groups`, a tensor for each parameter.
- Stage 0 in fp32: no wrapper, the optimizer steps on the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.statefile import Piece
from llmtop.trainer.worker.state.names import Named


class StateRefused(LlmtopError):
    """This run's state cannot be saved or loaded; the training itself is well."""


class Slab(Struct, frozen=True, kw_only=True, eq=False):
    """One tensor that an inner optimizer steps on."""

    master: Any
    group: int
    owner: Any
    """The inner optimizer that has its state."""
    pieces: tuple[Piece, ...]
    replicated: bool
    """Every rank has the same one."""

    @property
    def flat(self) -> torch.Tensor:
        return flat(self.master)


class Layout(Struct, frozen=True, kw_only=True, eq=False):
    slabs: tuple[Slab, ...]
    group_of: dict[int, int]
    """Id of a trained parameter to its group, also where this rank has no piece of it."""
    refresh: Callable[[], None]
    """Collective. Makes the model's weights follow the slabs."""
    loss_scaler: Any = None


def layout_of(engine: Any, named: Sequence[Named]) -> Layout:
    """Local. Raises StateRefused for what has no known layout."""
    wrapper, inner = engine.optimizer, engine.basic_optimizer
    _refuse_unknown(engine)
    numbers = {id(one.parameter): one for one in named}
    kind = type(wrapper).__name__
    makers: dict[str, Callable[[Any, Any, dict[int, Named]], Layout]] = {
        "DeepSpeedZeroOptimizer": _zero12,
        "DeepSpeedZeroOptimizer_Stage3": _zero3,
        "BF16_Optimizer": _bf16,
        "FP16_Optimizer": _fused,
        "FP16_UnfusedOptimizer": _unfused,
    }
    if wrapper is inner:
        return _plain(inner, numbers)
    if kind not in makers:
        raise StateRefused(
            f"the state of DeepSpeed's {kind} cannot be saved or loaded",
            why="llmtop does not know how it keeps the optimizer's tensors",
            fix="run without the DeepSpeed option that asks for it",
        )
    return makers[kind](wrapper, inner, numbers)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in a row, the same memory."""
    if not tensor.is_contiguous():
        raise StateRefused(
            "a tensor of the state does not lie in a row in memory", why=f"its shape is {tuple(tensor.shape)}"
        )
    return tensor.detach().view(-1)


def _refuse_unknown(engine: Any) -> None:
    wrapper = engine.optimizer
    parallel = getattr(engine, "mpu", None) is not None or getattr(engine, "has_moe_layers", False)
    if parallel:
        raise StateRefused(
            "the state of a model that is itself spread over ranks cannot be saved or loaded",
            why="its parameters differ between the ranks of a data-parallel group",
            fix="run without tensor, pipeline or expert parallelism",
        )
    if getattr(wrapper, "zenflow", False):
        raise StateRefused("the state of ZenFlow cannot be saved or loaded", fix="run without zenflow")
    if getattr(wrapper, "swap_optimizer", False):
        raise StateRefused(
            "optimizer state on NVMe cannot be saved or loaded",
            why="between steps it is in the swap files of DeepSpeed, not in memory",
            fix="use --offload-optimizer cpu or none for a run that is to be saved or changed",
        )


def _zero12(wrapper: Any, inner: Any, numbers: dict[int, Named]) -> Layout:
    slabs = []
    for index, master in enumerate(wrapper.single_partition_of_fp32_groups):
        parameters = wrapper.round_robin_bit16_groups[index]
        begins = wrapper.round_robin_bit16_offsets[index]
        rank = torch.distributed.get_rank(wrapper.real_dp_process_group[index])
        pieces = _cut(
            [numbers[id(one)] for one in parameters], begins, rank * int(master.numel()), int(master.numel())
        )
        slabs.append(Slab(master=master, group=index, owner=inner, pieces=pieces, replicated=False))
    return Layout(
        slabs=tuple(slabs),
        group_of=_members(wrapper.bit16_groups),
        refresh=wrapper.update_lp_params,
        loss_scaler=wrapper.loss_scaler,
    )


def _bf16(wrapper: Any, inner: Any, numbers: dict[int, Named]) -> Layout:
    slabs = []
    for index, master in enumerate(wrapper.fp32_groups_flat_partition):
        members = [numbers[id(one)] for one in wrapper.bf16_groups[index]]
        rank = torch.distributed.get_rank(wrapper.real_dp_process_group[index])
        pieces = _cut(members, _row(members), rank * int(master.numel()), int(master.numel()))
        slabs.append(Slab(master=master, group=index, owner=inner, pieces=pieces, replicated=False))
    return Layout(
        slabs=tuple(slabs), group_of=_members(wrapper.bf16_groups), refresh=wrapper.update_lp_params
    )


def _zero3(wrapper: Any, inner: Any, numbers: dict[int, Named]) -> Layout:
    slabs = []
    for index, master in enumerate(wrapper.fp32_partitioned_groups_flat):
        pieces, at = [], 0
        for parameter in wrapper.fp16_groups[index]:
            piece = _shard(numbers[id(parameter)], at)
            if piece is not None:
                pieces.append(piece)
            at += int(parameter.ds_tensor.ds_numel)
        on_gpu = wrapper.offload_optimizer and wrapper.subgroup_to_device[index] != "cpu"
        slabs.append(
            Slab(
                master=master,
                group=wrapper.sub_group_to_group_id[index],
                owner=wrapper.backup_optimizer if on_gpu else inner,
                pieces=tuple(pieces),
                replicated=False,
            )
        )

    def refresh() -> None:
        wrapper.checkpoint_event_prologue()
        for index in range(len(wrapper.fp32_partitioned_groups_flat)):
            wrapper._reassign_or_swap_out_partitioned_parameters(index)
        wrapper.checkpoint_event_epilogue()

    return Layout(
        slabs=tuple(slabs),
        group_of=_members(wrapper.fp16_groups, wrapper.sub_group_to_group_id),
        refresh=refresh,
        loss_scaler=wrapper.loss_scaler,
    )


def _fused(wrapper: Any, inner: Any, numbers: dict[int, Named]) -> Layout:
    slabs = []
    for index, master in enumerate(wrapper.fp32_groups_flat):
        members = [numbers[id(one)] for one in wrapper.fp16_groups[index]]
        pieces = _cut(members, _row(members), 0, int(master.numel()))
        slabs.append(Slab(master=master, group=index, owner=inner, pieces=pieces, replicated=True))

    def refresh() -> None:
        for slab in slabs:
            _spread(slab, numbers)

    return Layout(
        slabs=tuple(slabs),
        group_of=_members(wrapper.fp16_groups),
        refresh=refresh,
        loss_scaler=wrapper.loss_scale_config,
    )


def _unfused(wrapper: Any, inner: Any, numbers: dict[int, Named]) -> Layout:
    slabs = [
        _one(numbers[id(parameter)], master, group, inner)
        for group, (masters, parameters) in enumerate(
            zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True)
        )
        for master, parameter in zip(masters, parameters, strict=True)
    ]

    def refresh() -> None:
        for slab in slabs:
            _spread(slab, numbers)

    return Layout(
        slabs=tuple(slabs),
        group_of=_members(wrapper.fp16_groups),
        refresh=refresh,
        loss_scaler=wrapper.loss_scale_config,
    )


def _plain(inner: Any, numbers: dict[int, Named]) -> Layout:
    slabs = [
        _one(numbers[id(parameter)], parameter, group, inner)
        for group, keys in enumerate(inner.param_groups)
        for parameter in keys["params"]
        if parameter.requires_grad
    ]
    return Layout(
        slabs=tuple(slabs),
        group_of={id(slab.master): slab.group for slab in slabs},
        refresh=lambda: None,
    )


def _one(named: Named, master: Any, group: int, owner: Any) -> Slab:
    piece = Piece(named.number, 0, int(master.numel()), 0)
    return Slab(master=master, group=group, owner=owner, pieces=(piece,), replicated=True)


def _row(members: list[Named]) -> list[int]:
    """Where each begins when they follow each other without a gap."""
    begins, at = [], 0
    for one in members:
        begins.append(at)
        at += torch.Size(one.shape).numel()
    return begins


def _cut(members: list[Named], begins: Sequence[int], first: int, count: int) -> tuple[Piece, ...]:
    """What the elements `first` to `first + count` of a row of parameters are."""
    pieces = []
    for one, begin in zip(members, begins, strict=True):
        low = max(begin, first)
        high = min(begin + torch.Size(one.shape).numel(), first + count)
        if low < high:
            pieces.append(Piece(one.number, low - begin, high - low, low - first))
    return tuple(pieces)


def _shard(named: Named, offset: int) -> Piece | None:
    """This rank's part of a ZeRO-3 parameter; None where it is all padding."""
    parameter = named.parameter
    size = int(parameter.ds_tensor.ds_numel)
    start = int(parameter.ds_zero_partition_rank) * size
    count = min(size, int(parameter.ds_numel) - start)
    return Piece(named.number, start, count, offset) if count > 0 else None


def frozen_piece(named: Named) -> Piece:
    """What this rank holds of a weight that is not trained; a count of 0 where it is nothing."""
    parameter = named.parameter
    if not hasattr(parameter, "ds_tensor"):
        return Piece(named.number, 0, int(parameter.numel()), 0)
    return _shard(named, 0) or Piece(named.number, 0, 0, 0)


def _spread(slab: Slab, numbers: dict[int, Named]) -> None:
    """Round the master weights into the model's own, on a rank that has both whole."""
    by_number = {one.number: one.parameter for one in numbers.values()}
    with torch.no_grad():
        for piece in slab.pieces:
            target = flat(by_number[piece.parameter])
            target[piece.start : piece.start + piece.count].copy_(
                slab.flat[piece.offset : piece.offset + piece.count]
            )


def _members(groups: Sequence[Sequence[Any]], group_ids: dict[int, int] | None = None) -> dict[int, int]:
    return {
        id(parameter): index if group_ids is None else group_ids[index]
        for index, group in enumerate(groups)
        for parameter in group
    }
