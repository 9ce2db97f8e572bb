"""Points of the backward pass that only ZeRO-3 has."""

from __future__ import annotations

from llmtop.profiler.memory.flatcopy import Fill, fills
from llmtop.profiler.memory.flush import blocks_before_flush
from llmtop.profiler.memory.reduction import to_host_bytes
from llmtop.profiler.memory.waiting import (
    block_ends,
    is_checkpointed,
    kept_bytes,
    last_matrix,
    recomputed_bytes,
)
from llmtop.profiler.memory.walk import Bytes, Walk, tied_head_gradient, with_resident


def sharded_points(walk: Walk) -> list[Bytes]:
    """Those that may be the largest point of the pass."""
    sizes = walk.sizes
    if sizes.stage != 3:
        return []
    found = [] if walk.spec.on_cpu else [_at_fill(walk, fill) for fill in fills(sizes)] + _head_to_host(walk)
    if sizes.ranks > 1 and sizes.experts:
        found.append(_experts_gathered(walk))
    return found


def _at_fill(walk: Walk, fill: Fill) -> Bytes:
    """What ZeRO-3's bucket holds is copied together to be reduced when a matrix of a block has its gradient:
    the products of that block are done."""
    sizes, width, layers = walk.sizes, walk.sizes.dtype_bytes, walk.spec.model.num_layers
    index = layers - 1 - fill.blocks_done
    again = is_checkpointed(sizes, index)
    block = walk.block
    of_block = recomputed_bytes(walk) if again else block.saved * sizes.tokens + block.saved_weights
    kept = kept_bytes(walk, index + 1) + walk.constant + walk.mask
    kept += round(of_block * (fill.left - (0 if again else 1)))
    offloaded = walk.spec.options.offload_optimizer != "none"
    to_host = to_host_bytes(sizes, fill.largest) if offloaded else 0
    # The reentrant form holds the recomputed output beside its gradient.
    widths = 2 if again and walk.spec.options.checkpointing_reentrant else 1
    # Gathered is at most what the blocks that are left, and the embedding, still need.
    left = (index + 1) * sizes.layer_params + sizes.head_params
    return with_resident(
        walk,
        activations=kept,
        workspace=widths * block.gradient * sizes.tokens + to_host,
        gradients=tied_head_gradient(walk) + last_matrix(walk) * width,
        buffers=fill.elements * width,
        rounding=block_ends(walk, index + 1),
        gathered=left * width,
    )


def _head_to_host(walk: Walk) -> list[Bytes]:
    """ZeRO-3's head larger than the bucket, on its way to the host as soon as the last norm's gradient comes:
    its part is copied out, and the norm taken in fp64 or, if that is more, all of it cast."""
    sizes, width = walk.sizes, walk.sizes.dtype_bytes
    offloaded = walk.spec.options.offload_optimizer != "none"
    if sizes.stage != 3 or not offloaded or blocks_before_flush(walk) >= 0:
        return []
    last, fused = walk.spec.model.num_layers - 1, "fused_linear_cross_entropy" in sizes.liger
    kept = kept_bytes(walk, last + 1) + walk.constant + walk.mask
    # The head was gathered within the same limit, and is released; a fused loss reads it by itself, and it
    # stays.
    without_head = max(0, walk.states.gathered - width * sizes.head_params)
    found = with_resident(
        walk,
        activations=kept,
        workspace=walk.block.gradient * sizes.tokens + to_host_bytes(sizes, sizes.head_params),
        gradients=width * sizes.head_params,
        gathered=None if fused else without_head,
    )
    return [found]


def _experts_gathered(walk: Walk) -> Bytes:
    """Before the last block's experts are differentiated ZeRO-3 gathers them in one flat tensor, which lies
    beside them until each is copied out of it (deepspeed 0.19.8,
    `zero/partition_parameters.py:AllGatherCoalescedHandle.wait`)."""
    sizes, block, layers = walk.sizes, walk.block, walk.spec.model.num_layers
    kept = kept_bytes(walk, layers) + walk.constant + walk.mask
    if is_checkpointed(sizes, layers - 1):
        kept += (block.saved - block.input_saved) * sizes.tokens
    return with_resident(
        walk,
        activations=kept,
        workspace=block.gradient * sizes.tokens,
        gradients=walk.accumulated + tied_head_gradient(walk),
        buffers=sizes.experts * sizes.dtype_bytes,
        rounding=block_ends(walk, layers),
    )
