"""The backward pass as a walk over the blocks: which moment of it is the largest.

Activations shrink block by block while gradients grow. ZeRO-2 allocates its bucket at the first
gradient, and its share of the gradients, all at once, when the bucket is full for the first time;
so the largest point is either the last block or the one after that first flush, or the end.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.flush import blocks_before_flush, flush_points
from llmtop.profiler.memory.mlp import experts_backward, experts_gradient
from llmtop.profiler.memory.reduction import end_of_backward
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sharded import sharded_points
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.states import StateBytes
from llmtop.profiler.memory.waiting import (
    block_ends,
    bucket_at,
    is_checkpointed,
    kept_bytes,
    last_matrix,
    recomputed_bytes,
)
from llmtop.profiler.memory.walk import (
    Bytes,
    Walk,
    bucket_bytes,
    reduces_at_once,
    tied_head_gradient,
    walk_of,
    with_resident,
)


class PassBytes(Struct, frozen=True, kw_only=True):
    """Bytes on top of what is resident between steps."""

    forward_end: Bytes
    loss_backward: Bytes
    last_block: Bytes
    first_block: Bytes


def pass_bytes(spec: RunSpec, sizes: Sizes, states: StateBytes) -> PassBytes:
    """Forward and backward of one micro-batch, the last of a step."""
    walk = walk_of(spec, sizes, states)
    return PassBytes(
        forward_end=_forward_end(walk),
        loss_backward=_loss_backward(walk),
        last_block=_largest_block(walk),
        first_block=end_of_backward(walk),
    )


def _forward_end(walk: Walk) -> Bytes:
    layers = walk.spec.model.num_layers
    kept = kept_bytes(walk, layers) + walk.final_norm + walk.constant + walk.mask
    if "fused_linear_cross_entropy" in walk.sizes.liger:
        # The fused loss keeps its gradients for backward, and no logits.
        return with_resident(
            walk,
            activations=kept + walk.loss.kept,
            gradients=walk.accumulated + walk.loss.head_gradient,
            rounding=block_ends(walk, layers),
        )
    return with_resident(
        walk,
        activations=kept,
        logits=walk.loss.kept,
        gradients=walk.accumulated,
        rounding=block_ends(walk, layers),
    )


def _loss_backward(walk: Walk) -> Bytes:
    layers = walk.spec.model.num_layers
    before = kept_bytes(walk, layers) + walk.final_norm + walk.constant + walk.mask
    found = with_resident(
        walk,
        activations=before + walk.loss.peak_activations,
        logits=walk.loss.peak_logits,
        gradients=walk.accumulated + walk.loss.head_gradient,
        workspace=walk.loss.peak_workspace,
        buffers=_kept_bucket(walk),
        rounding=block_ends(walk, layers),
    )
    return _in_first_pass(walk, found)


def _in_first_pass(walk: Walk, later: Bytes) -> Bytes:
    """The loss of the first pass, if that is more: no optimizer state is there yet, but ZeRO-3 on one rank,
    which has nothing to gather, makes a whole head for a fused loss that reads it by itself.

    deepspeed 0.19.8, `zero/parameter_offload.py:ZeROOrderedDict`.
    """
    sizes = walk.sizes
    head = sizes.head_params * sizes.dtype_bytes
    if sizes.stage != 3 or not walk.loss.reads_head or walk.states.gathered or head <= walk.states.optimizer:
        return later
    first = {**later, Component.OPTIMIZER_STATE: 0}
    first[Component.PARAMETERS] += head
    return first


def _kept_bucket(walk: Walk) -> int:
    """ZeRO-1 keeps its bucket from one micro-batch of a step to the next."""
    if walk.sizes.stage == 1 and walk.spec.options.grad_accum > 1:
        return bucket_bytes(walk.spec, walk.sizes)
    return 0


class _BlockAlive(Struct, frozen=True, kw_only=True):
    """The worst point of one block's backward."""

    activations: int
    """What was saved and is not used up yet."""
    weight_gradient: int
    """Of the matrix whose product is being differentiated."""
    workspace: int
    """Gradients of activations, and what nobody saved."""

    @property
    def total(self) -> int:
        return self.activations + self.weight_gradient + self.workspace


def _block_alive(walk: Walk, index: int) -> _BlockAlive:
    """Of block `index`, counted from 0."""
    block, tokens = walk.block, walk.sizes.tokens
    kept, workspace = kept_bytes(walk, index + 1) + walk.constant + walk.mask, block.gradient * tokens
    if is_checkpointed(walk.sizes, index):
        kept += recomputed_bytes(walk)
        if walk.spec.options.checkpointing_reentrant:
            workspace += block.gradient * tokens  # the reentrant form also holds the recomputed output
    matrix = 0 if walk.sizes.lora_rank else last_matrix(walk) * walk.sizes.dtype_bytes
    product = _first_product(walk) * tokens
    if block.saved_weights:
        # Passed back through the copies of a weight its gradient is there twice, the product's input gone.
        product = max(product, matrix)
    extra, freed = block.backward_extra * tokens, block.backward_freed * tokens + block.weights_freed
    found = _BlockAlive(activations=kept, weight_gradient=matrix, workspace=workspace + product)
    if extra - freed >= product + matrix:
        found = _BlockAlive(activations=kept - freed, weight_gradient=0, workspace=workspace + extra)
    experts = _in_experts(walk, kept, workspace)
    return found if experts is None or found.total >= experts.total else experts


def _in_experts(walk: Walk, kept: int, workspace: int) -> _BlockAlive | None:
    """All experts are one tensor, whose gradient is made at once."""
    sizes = walk.sizes
    made = experts_gradient(walk.spec, sizes)
    if not made:
        return None
    extra, freed = experts_backward(walk.spec, sizes)
    return _BlockAlive(
        activations=kept - freed * sizes.tokens,
        weight_gradient=made * sizes.dtype_bytes,
        workspace=workspace + extra * sizes.tokens,
    )


def _first_product(walk: Walk) -> int:
    """Bytes per token of the gradient of the MLP's product, made while everything is still kept."""
    model = walk.spec.model
    return max(model.intermediate_size, 1) * walk.sizes.dtype_bytes


def _gradients_after(walk: Walk, blocks_done: int, *, flushed: bool) -> int:
    """Gradients held when `blocks_done` blocks are through, buckets not included."""
    sizes = walk.sizes
    width = sizes.dtype_bytes
    if sizes.stage == 3:
        return 0
    if reduces_at_once(walk):
        if not flushed:
            return 0
        share = 0 if walk.spec.options.offload_optimizer != "none" else sizes.held_gradients
        # A bucket with the parts of several ranks is made one flat tensor before room for the share is made.
        flat = sizes.zero.reduce_bucket_size if sizes.shard < sizes.zero.reduce_bucket_size else 0
        return width * max(share, flat if sizes.ranks > 1 else 0)
    if walk.accumulated and not walk.spec.on_cpu:
        return 0  # added to those of earlier micro-batches
    head = 0 if walk.spec.model.tied_embeddings or not sizes.head_trained else sizes.head_params
    return width * (head + blocks_done * sizes.layer_params)


def _turns(layers: int, every: int) -> list[int]:
    """How many blocks are done where the sum of activations and gradients can be largest.

    Both change by the same amount from block to block, so without checkpointing (or with all blocks
    checkpointed) that is one of the two ends. With every k-th block checkpointed, each of the blocks that
    stand alike between two checkpoints goes in equal steps: the ends of those at, above and below one.
    """
    last = layers - 1
    if every <= 1:
        return [0, last]
    top = last // every * every
    blocks = {last, top + 1, top, top - 1, top + 1 - every, every - 1, 1, 0}
    return sorted(last - index for index in blocks if 0 <= index <= last)


def _until_checkpoint(done: int, last: int, sizes: Sizes) -> set[int]:
    """`done` blocks, and as many as are done at the next checkpointed one."""
    every = max(1, sizes.checkpoint_every)
    return {done, done + (last - done) % every}


def _largest_block(walk: Walk) -> Bytes:
    last = walk.spec.model.num_layers - 1
    points = [(done, False) for done in _turns(last + 1, walk.sizes.checkpoint_every)]
    before = blocks_before_flush(walk)
    if reduces_at_once(walk) and before <= last:
        # After the flush gradients stay as they are, so what comes later is smaller: all but a recomputed
        # block of the reentrant form, with its output, below one that is not.
        after = min(before + 1, last)
        points = [(done, False) for done, _ in points if done <= before]
        points += [(done, before < last) for done in _until_checkpoint(after, last, walk.sizes)]
        if walk.block.peak_in_attention and before >= 0:
            # The first flush comes with a gradient of the block's MLP, before the attention's peak.
            points.append((before, True))
    candidates = [_at_block(walk, done, flushed=flushed) for done, flushed in points]
    candidates += flush_points(walk) + sharded_points(walk)
    return max(candidates, key=lambda components: sum(components.values()))


def _at_block(walk: Walk, blocks_done: int, *, flushed: bool) -> Bytes:
    alive = _block_alive(walk, walk.spec.model.num_layers - 1 - blocks_done)
    held = _gradients_after(walk, blocks_done, flushed=flushed) + alive.weight_gradient
    return with_resident(
        walk,
        activations=alive.activations,
        workspace=alive.workspace,
        gradients=walk.accumulated + tied_head_gradient(walk) + held,
        buffers=bucket_at(walk, blocks_done),
        rounding=block_ends(walk, walk.spec.model.num_layers - blocks_done),
    )
