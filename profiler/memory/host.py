"""Host memory of one node: what offload keeps there, pinned or not, and the ranks' own processes."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.cost.shape import TensorGroup, tensors
from llmtop.profiler.memory.lora import linear
from llmtop.profiler.memory.result import HostBytes
from llmtop.profiler.memory.secondary import group_ranks
from llmtop.profiler.memory.sizes import PACKED_BYTES, Sizes
from llmtop.profiler.memory.states import sub_group_elements
from llmtop.profiler.memory.swapped import (
    flat_param_bytes,
    on_drive_bytes,
    optimizer_buffer_bytes,
    param_buffer_bytes,
)

LIBRARY_BYTES = 600_000_000
"""Pages of libraries that the ranks of a node share, in whose PSS each has its part: what ranks that were
forked from one process shared with it (H200)."""
RANK_PROCESS_BYTES = 1_350_000_000
"""A CUDA rank's own beside them, without offload (107 runs on H200: one rank 1.81 to 2.15 GB in all)."""
LATER_BYTES = 700_000_000
"""Of that, what is not there yet when ZeRO-3 lays its shards out anew (eleven runs on H200: the host then
held 1.25 GB and two bytes a weight)."""
TORCH_ADAMW_BYTES = 8
"""Of an element: two fp32 temporaries of torch's AdamW on the CPU, which goes tensor by tensor."""


class _Kept(Struct, frozen=True):
    """Bytes of one rank."""

    pinned: int
    pageable: int


def pinned_block(size_bytes: int) -> int:
    """Bytes that torch's pinned allocator takes for one block: the next power of two (pytorch#95823).

    A block that is freed stays with it, for requests of that size.
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_bytes(spec: RunSpec, sizes: Sizes) -> HostBytes:
    """Per node. Follows deepspeed 0.19.8 `zero/stage_1_and_2.py` and `zero/stage3.py` under offload."""
    ranks = spec.options.gpus
    kept = _offloaded(spec, sizes)
    parts = {
        "processes": LIBRARY_BYTES + ranks * RANK_PROCESS_BYTES,
        "pinned": ranks * kept.pinned,
        "pageable": ranks * kept.pageable,
        "start": ranks * _start(spec, sizes, kept),
    }
    return HostBytes(
        total_bytes=sum(parts.values()),
        pinned_bytes=parts["pinned"],
        nvme_bytes=ranks * on_drive_bytes(spec, sizes),
        components={name: size for name, size in parts.items() if size},
    )


def _start(spec: RunSpec, sizes: Sizes, kept: _Kept) -> int:
    """What the start takes beyond what is there later.

    ZeRO-3's trained shards go through the host on their way to one flat tensor
    (`zero/stage3.py:_create_fp16_partitions_with_defragmentation`), before the rest of the process is there.
    """
    if sizes.stage != 3 or spec.options.offload_param != "none":
        return 0
    shards = sizes.dtype_bytes * sizes.shard
    return max(0, shards - LATER_BYTES - kept.pinned - kept.pageable)


def _offloaded(spec: RunSpec, sizes: Sizes) -> _Kept:
    kept = _of_optimizer(spec, sizes)
    # DeepSpeed locks its swap buffers itself, page by page (`csrc/pin_memory/page_alloc.cpp`).
    locked = optimizer_buffer_bytes(spec, sizes) + param_buffer_bytes(spec, sizes)
    return _Kept(kept.pinned + _of_parameters(spec, sizes) + locked, kept.pageable)


def _of_optimizer(spec: RunSpec, sizes: Sizes) -> _Kept:
    """Moments, master weights, gradients, and what carries them to and fro."""
    options, width, shard = spec.options, sizes.dtype_bytes, sizes.shard
    if options.offload_optimizer == "none":
        return _Kept(0, 0)
    group = sub_group_elements(sizes) if sizes.stage == 3 else shard
    blocks: list[int] = []
    pageable = groups = 0
    if options.offload_optimizer == "nvme":
        blocks += [4 * shard, width * shard]
    else:
        pageable = 8 * shard  # the two moments
        if options.optimizer == "adamw_torch":
            pageable += TORCH_ADAMW_BYTES * group
        if sizes.stage in (1, 2):
            # Master, fp32 gradients, 16-bit staging of the weights, and of the largest gradient.
            blocks += [4 * shard, 4 * shard, width * shard, width * sizes.largest_tensor]
            if options.grad_accum > 1:
                pageable += width * sizes.held_gradients
        else:
            pageable += 4 * shard
            # A pinned gradient buffer for each sub-group, and one in the model's precision for all.
            groups = int(shard) // int(group)
            blocks += [4 * (shard - groups * group), width * shard]
            if options.offload_param == "none":
                pageable += width * group  # new weights in 16 bits on their way to the device
    if not sizes.zero.optimizer_pin_memory:
        return _Kept(0, pageable + sum(blocks) + 4 * groups * group)
    return _Kept(groups * pinned_block(4 * group) + sum(map(pinned_block, blocks)), pageable)


def _of_parameters(spec: RunSpec, sizes: Sizes) -> int:
    """Pinned bytes of one rank's weights."""
    options, width, shard = spec.options, sizes.dtype_bytes, sizes.shard
    if options.offload_param == "cpu":
        packed = PACKED_BYTES.get(options.quantization, width)
        one_by_one = _shard_blocks(spec.model, sizes.ranks, width, packed, is_whole=not sizes.lora_rank)
        second = group_ranks(sizes)
        if second > 1:  # beside the first, where it lies
            one_by_one += _shard_blocks(spec.model, second, width, packed, is_whole=False)
        return pinned_block(width * shard) + one_by_one
    return pinned_block(flat_param_bytes(spec, sizes))


@lru_cache(maxsize=256)
def _shard_blocks(model: ModelShape, ranks: int, width: int, packed: float, *, is_whole: bool) -> int:
    """Pinned blocks of the shards as they are first made, each by itself.

    Trained ones are laid out anew in a flat buffer, but their blocks stay with the allocator; frozen ones
    stay where they are. A tied head is made as well, and thrown away, where the model is made in shards.
    """
    matrices = set(linear(model))
    head = [_embedding(model)] if is_whole and model.tied_embeddings else []
    total = 0
    for group in (*tensors(model), *head):
        each = packed if group in matrices else width
        total += group.count * pinned_block(round(-(-group.numel // ranks) * each))
    return total


def _embedding(model: ModelShape) -> TensorGroup:
    return tensors(model)[0]
