"""What waits for the backward pass, block by block."""

from __future__ import annotations

from llmtop.profiler.memory.mlp import mlp_copies
from llmtop.profiler.memory.pool import OWN_BLOCKS, block_end
from llmtop.profiler.memory.sizes import Sizes, checkpointed_blocks
from llmtop.profiler.memory.walk import Walk, bucket_bytes


def kept_bytes(walk: Walk, blocks: int) -> int:
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


def block_ends(walk: Walk, blocks: int) -> int:
    """What the allocator's blocks hold beyond the activations of the lowest `blocks` blocks."""
    if walk.spec.on_cpu:
        return 0
    sizes, model = walk.sizes, walk.spec.model
    inputs = checkpointed_blocks(blocks, sizes.checkpoint_every)
    hidden = block_end(model.hidden_size * sizes.dtype_bytes * sizes.tokens)
    wide = block_end(model.intermediate_size * sizes.dtype_bytes * sizes.tokens)
    ends = (blocks - inputs) * mlp_copies(model, sizes) * wide + inputs * hidden
    return round(ends * OWN_BLOCKS)


def is_checkpointed(sizes: Sizes, index: int) -> bool:
    return bool(sizes.checkpoint_every) and index % sizes.checkpoint_every == 0


def recomputed_bytes(walk: Walk) -> int:
    """What the recomputation of a block saves: all but its input, which was kept."""
    block = walk.block
    return (block.saved - block.input_saved) * walk.sizes.tokens + block.saved_weights


def last_matrix(walk: Walk) -> int:
    """Weights of the MLP's matrix that is differentiated first; gate and up in one are wider."""
    model = walk.spec.model
    return min(walk.sizes.wide_linear, model.hidden_size * max(model.intermediate_size, 1))


def bucket_at(walk: Walk, blocks_done: int) -> int:
    whole = bucket_bytes(walk.spec, walk.sizes)
    if not walk.spec.on_cpu:
        return whole
    return min(whole, blocks_done * walk.sizes.layer_params * walk.sizes.dtype_bytes)
