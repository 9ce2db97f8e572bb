"""The backward pass as a walk over the blocks: which moment of it is the largest.

Activations shrink block by block while gradients grow. ZeRO-2 allocates its bucket at the first
gradient, and its share of the gradients, all at once, when the bucket is full for the first time;
so the largest point is either the last block or the one after that first flush, or the end.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.flatcopy import Fill, fills
from llmtop.profiler.memory.mlp import experts_backward, experts_gradient, mlp_copies
from llmtop.profiler.memory.pool import OWN_BLOCKS, block_end
from llmtop.profiler.memory.reduction import end_of_backward, to_host_bytes
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import Sizes, checkpointed_blocks
from llmtop.profiler.memory.states import StateBytes
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


def _kept(walk: Walk, blocks: int) -> int:
    """Activations of the lowest `blocks` blocks that wait for their backward."""
    sizes, hidden = walk.sizes, walk.spec.model.hidden_size
    inputs = checkpointed_blocks(blocks, sizes.checkpoint_every)
    first_norm = 0
    if sizes.lora_rank and blocks and not sizes.checkpoint_every:
        # Nothing before the first adapter needs a gradient, so the first norm keeps nothing.
        first_norm = hidden * 4
    kept = inputs * hidden * sizes.dtype_bytes + (blocks - inputs) * walk.block.saved - first_norm
    done = walk.spec.model.num_layers - blocks
    done -= checkpointed_blocks(walk.spec.model.num_layers, sizes.checkpoint_every) - inputs
    left = done * walk.packed_inputs  # of blocks that are done, and that no checkpoint counts
    return kept * sizes.tokens + (blocks - inputs) * walk.block.saved_weights + left


def _block_ends(walk: Walk, blocks: int) -> int:
    """What the allocator's blocks hold beyond the activations of the lowest `blocks` blocks."""
    if walk.spec.on_cpu:
        return 0
    sizes, model = walk.sizes, walk.spec.model
    inputs = checkpointed_blocks(blocks, sizes.checkpoint_every)
    hidden = block_end(model.hidden_size * sizes.dtype_bytes * sizes.tokens)
    wide = block_end(model.intermediate_size * sizes.dtype_bytes * sizes.tokens)
    ends = (blocks - inputs) * mlp_copies(model, sizes) * wide + inputs * hidden
    return round(ends * OWN_BLOCKS)


def _is_checkpointed(sizes: Sizes, index: int) -> bool:
    return bool(sizes.checkpoint_every) and index % sizes.checkpoint_every == 0


def _forward_end(walk: Walk) -> Bytes:
    layers = walk.spec.model.num_layers
    kept = _kept(walk, layers) + walk.final_norm + walk.constant + walk.mask
    if "fused_linear_cross_entropy" in walk.sizes.liger:
        # The fused loss keeps its gradients for backward, and no logits.
        return with_resident(
            walk,
            activations=kept + walk.loss.kept,
            gradients=walk.accumulated + walk.loss.head_gradient,
            rounding=_block_ends(walk, layers),
        )
    return with_resident(
        walk,
        activations=kept,
        logits=walk.loss.kept,
        gradients=walk.accumulated,
        rounding=_block_ends(walk, layers),
    )


def _loss_backward(walk: Walk) -> Bytes:
    layers = walk.spec.model.num_layers
    before = _kept(walk, layers) + walk.final_norm + walk.constant + walk.mask
    found = with_resident(
        walk,
        activations=before + walk.loss.peak_activations,
        logits=walk.loss.peak_logits,
        gradients=walk.accumulated + walk.loss.head_gradient,
        workspace=walk.loss.peak_workspace,
        buffers=_kept_bucket(walk),
        rounding=_block_ends(walk, layers),
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


def _bucket_at(walk: Walk, blocks_done: int) -> int:
    whole = bucket_bytes(walk.spec, walk.sizes)
    if not walk.spec.on_cpu:
        return whole
    return min(whole, blocks_done * walk.sizes.layer_params * walk.sizes.dtype_bytes)


def _kept_bucket(walk: Walk) -> int:
    """ZeRO-1 keeps its bucket from one micro-batch of a step to the next."""
    if walk.sizes.stage == 1 and walk.spec.options.grad_accum > 1:
        return bucket_bytes(walk.spec, walk.sizes)
    return 0


def _recomputed(walk: Walk) -> int:
    """What the recomputation of a block saves: all but its input, which was kept."""
    block = walk.block
    return (block.saved - block.input_saved) * walk.sizes.tokens + block.saved_weights


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
    kept, workspace = _kept(walk, index + 1) + walk.constant + walk.mask, block.gradient * tokens
    if _is_checkpointed(walk.sizes, index):
        kept += _recomputed(walk)
        if walk.spec.options.checkpointing_reentrant:
            workspace += block.gradient * tokens  # the reentrant form also holds the recomputed output
    matrix = 0 if walk.sizes.lora_rank else _last_matrix(walk) * walk.sizes.dtype_bytes
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


def _last_matrix(walk: Walk) -> int:
    """Weights of the MLP's matrix that is differentiated first; gate and up in one are wider."""
    model = walk.spec.model
    return min(walk.sizes.wide_linear, model.hidden_size * max(model.intermediate_size, 1))


def _first_product(walk: Walk) -> int:
    """Bytes per token of the gradient of the MLP's product, made while everything is still kept."""
    model = walk.spec.model
    return max(model.intermediate_size, 1) * walk.sizes.dtype_bytes


def _blocks_before_flush(walk: Walk) -> int:
    """Blocks whose gradients fit the bucket before it is reduced for the first time; -1 where a head is
    larger than the bucket, so that the next gradient of all, the last norm's, has it reduced."""
    sizes = walk.sizes
    room = sizes.zero.reduce_bucket_size
    if sizes.head_trained and not walk.spec.model.tied_embeddings:
        if sizes.head_params > room:
            return -1
        room -= sizes.head_params
    return room // max(1, sizes.layer_params)


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
    before = _blocks_before_flush(walk)
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
    if reduces_at_once(walk) and before < 0:
        candidates.append(_head_reduced(walk))
    if not walk.spec.on_cpu:
        candidates += [_at_fill(walk, fill) for fill in fills(walk.sizes)]
        candidates += _head_to_host(walk)
    if walk.sizes.stage == 3 and walk.sizes.ranks > 1 and walk.sizes.experts:
        candidates.append(_experts_gathered(walk))
    return max(candidates, key=lambda components: sum(components.values()))


def _at_fill(walk: Walk, fill: Fill) -> Bytes:
    """What ZeRO-3's bucket holds is copied together to be reduced when a matrix of a block has its gradient:
    the products of that block are done."""
    sizes, width, layers = walk.sizes, walk.sizes.dtype_bytes, walk.spec.model.num_layers
    index = layers - 1 - fill.blocks_done
    again = _is_checkpointed(sizes, index)
    block = walk.block
    of_block = _recomputed(walk) if again else block.saved * sizes.tokens + block.saved_weights
    kept = _kept(walk, index + 1) + walk.constant + walk.mask
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
        gradients=tied_head_gradient(walk) + _last_matrix(walk) * width,
        buffers=fill.elements * width,
        rounding=_block_ends(walk, index + 1),
        gathered=left * width,
    )


def _head_to_host(walk: Walk) -> list[Bytes]:
    """ZeRO-3's head larger than the bucket, on its way to the host as soon as the last norm's gradient comes:
    its part is copied out, and the norm taken in fp64 or, if that is more, all of it cast."""
    sizes, width = walk.sizes, walk.sizes.dtype_bytes
    offloaded = walk.spec.options.offload_optimizer != "none"
    if sizes.stage != 3 or not offloaded or _blocks_before_flush(walk) >= 0:
        return []
    last, fused = walk.spec.model.num_layers - 1, "fused_linear_cross_entropy" in sizes.liger
    kept = _kept(walk, last + 1) + walk.constant + walk.mask
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
    kept = _kept(walk, layers) + walk.constant + walk.mask
    if _is_checkpointed(sizes, layers - 1):
        kept += (block.saved - block.input_saved) * sizes.tokens
    return with_resident(
        walk,
        activations=kept,
        workspace=block.gradient * sizes.tokens,
        gradients=walk.accumulated + tied_head_gradient(walk),
        buffers=sizes.experts * sizes.dtype_bytes,
        rounding=_block_ends(walk, layers),
    )


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
        activations=_kept(walk, layers) + walk.constant + walk.mask,
        workspace=walk.block.gradient * sizes.tokens + max(0, norm - sizes.dtype_bytes * beside),
        gradients=walk.accumulated + sizes.dtype_bytes * (sizes.head_params + beside),
        buffers=_bucket_at(walk, 0),
        rounding=_block_ends(walk, layers),
    )


def _at_block(walk: Walk, blocks_done: int, *, flushed: bool) -> Bytes:
    alive = _block_alive(walk, walk.spec.model.num_layers - 1 - blocks_done)
    held = _gradients_after(walk, blocks_done, flushed=flushed) + alive.weight_gradient
    return with_resident(
        walk,
        activations=alive.activations,
        workspace=alive.workspace,
        gradients=walk.accumulated + tied_head_gradient(walk) + held,
        buffers=_bucket_at(walk, blocks_done),
        rounding=_block_ends(walk, walk.spec.model.num_layers - blocks_done),
    )
