"""When the reduce bucket of stages 1 and 2 is emptied in the middle of the backward pass.

deepspeed 0.19.8, `runtime/zero/stage_1_and_2.py:reduce_ipg_grads`.
"""

from __future__ import annotations

from llmtop.profiler.memory.waiting import (
    block_ends,
    bucket_at,
    is_checkpointed,
    kept_bytes,
    last_matrix,
    recomputed_bytes,
)
from llmtop.profiler.memory.walk import Bytes, Walk, reduces_at_once, tied_head_gradient, with_resident


def blocks_before_flush(walk: Walk) -> int:
    """Blocks whose gradients fit the bucket before it is reduced for the first time; -1 where a head is
    larger than the bucket, so that the next gradient of all, the last norm's, has it reduced."""
    sizes = walk.sizes
    room = sizes.zero.reduce_bucket_size
    if sizes.head_trained and not walk.spec.model.tied_embeddings:
        if sizes.head_params > room:
            return -1
        room -= sizes.head_params
    return room // max(1, sizes.layer_params)


def _head_reduced(walk: Walk) -> Bytes:
    """A head larger than the bucket is reduced as it is; then the rank's share is made, or before that one
    flat tensor of the parts of several ranks (deepspeed 0.19.8, `zero/stage_1_and_2.py:reduce_ipg_grads`).

    On the way to the host its norm is taken in fp64 instead of a share.
    """
    sizes, layers = walk.sizes, walk.spec.model.num_layers
    offloaded = walk.spec.options.offload_optimizer != "none"
    share = 0 if offloaded else sizes.held_gradients
    beside = max(share, sizes.head_params if sizes.ranks > 1 else 0)
    norm = 8 * min(sizes.head_params, sizes.shard) if offloaded else 0
    return with_resident(
        walk,
        activations=kept_bytes(walk, layers) + walk.constant + walk.mask,
        workspace=walk.block.gradient * sizes.tokens + max(0, norm - sizes.dtype_bytes * beside),
        gradients=walk.accumulated + sizes.dtype_bytes * (sizes.head_params + beside),
        buffers=bucket_at(walk, 0),
        rounding=block_ends(walk, layers),
    )


def flush_points(walk: Walk) -> list[Bytes]:
    """Those that may be the largest point of the pass."""
    if not reduces_at_once(walk):
        return []
    before = blocks_before_flush(walk)
    found = [_head_reduced(walk)] if before < 0 else []
    if walk.spec.on_cpu:
        return found
    if walk.sizes.head_trained and not walk.spec.model.tied_embeddings and before >= 0:
        found.append(_opened(walk))
    layers, offloaded = walk.spec.model.num_layers, walk.spec.options.offload_optimizer != "none"
    if offloaded and 0 <= before < layers and not tied_head_gradient(walk):
        found.append(_at_block(walk, before, gradients=0, passing=8 * walk.sizes.head_params))
    done = _blocks_across_shares(walk)
    if not offloaded and done < layers:
        sizes = walk.sizes
        held = sizes.held_gradients + sizes.zero.reduce_bucket_size
        found.append(_at_block(walk, done, gradients=held * sizes.dtype_bytes, passing=0))
    return found


def _opened(walk: Walk) -> Bytes:
    """The bucket is made beside the first gradient of all, the head's."""
    layers = walk.spec.model.num_layers
    return with_resident(
        walk,
        activations=kept_bytes(walk, layers) + walk.final_norm + walk.constant + walk.mask,
        workspace=walk.block.gradient * walk.sizes.tokens,
        gradients=walk.accumulated + walk.sizes.head_params * walk.sizes.dtype_bytes,
        buffers=bucket_at(walk, 0),
        rounding=block_ends(walk, layers),
    )


def _blocks_across_shares(walk: Walk) -> int:
    """Blocks that are done when a rank that has its share's gradients already makes one flat tensor of a
    bucket with the parts of several ranks: the second one, or the one in which the last share begins."""
    sizes = walk.sizes
    if sizes.ranks == 1:
        return walk.spec.model.num_layers
    bucket = sizes.zero.reduce_bucket_size
    elements = bucket * max(2, -(-sizes.shard // bucket))
    head = 0 if walk.spec.model.tied_embeddings or not sizes.head_trained else sizes.head_params
    return max(0, elements - head) // max(1, sizes.layer_params)


def _at_block(walk: Walk, done: int, *, gradients: int, passing: int) -> Bytes:
    """The bucket is emptied for the gradient of the first matrix of the block after the `done` ones."""
    index = walk.spec.model.num_layers - 1 - done
    again = is_checkpointed(walk.sizes, index)
    widths = 2 if again and walk.spec.options.checkpointing_reentrant else 1
    matrix = last_matrix(walk) * walk.sizes.dtype_bytes
    return with_resident(
        walk,
        activations=kept_bytes(walk, index + 1)
        + (recomputed_bytes(walk) if again else 0)
        + walk.constant
        + walk.mask,
        workspace=widths * walk.block.gradient * walk.sizes.tokens + passing,
        gradients=walk.accumulated + tied_head_gradient(walk) + matrix + gradients,
        buffers=bucket_at(walk, done),
        rounding=block_ends(walk, index + 1),
    )
