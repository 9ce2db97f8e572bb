"""The state of a walk through the backward pass, and what every point of it has beside its own bytes."""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.blocks import BlockBytes, block_bytes, final_norm_saved
from llmtop.profiler.memory.loss import LossBytes, loss_bytes
from llmtop.profiler.memory.mask import mask_bytes
from llmtop.profiler.memory.mlp import product_width
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import Sizes, checkpointed_blocks
from llmtop.profiler.memory.states import StateBytes

Bytes = dict[Component, int]


class Walk(Struct, frozen=True, kw_only=True):
    """Inputs of the walk, in bytes for the whole micro-batch."""

    spec: RunSpec
    sizes: Sizes
    states: StateBytes
    block: BlockBytes
    loss: LossBytes
    final_norm: int
    constant: int
    mask: int
    """Of eager attention, which checkpoints hold until the first block is done."""
    accumulated: int
    """Gradients of earlier micro-batches of the same step."""
    packed_inputs: int
    """Inputs of one block's 8-bit matrices, which the end of its backward does not free."""


def walk_of(spec: RunSpec, sizes: Sizes, states: StateBytes) -> Walk:
    """What a micro-batch of the spec walks through, the last one of a step."""
    return Walk(
        spec=spec,
        sizes=sizes,
        states=states,
        block=block_bytes(spec, sizes),
        loss=loss_bytes(spec, sizes),
        final_norm=final_norm_saved(spec, sizes) * sizes.tokens,
        constant=_before_blocks(spec, sizes) + _kept_inputs(spec, sizes),
        mask=mask_bytes(spec, sizes) if sizes.checkpoint_every else 0,
        accumulated=_accumulated(spec, sizes),
        packed_inputs=_packed_inputs(spec, sizes),
    )


def _before_blocks(spec: RunSpec, sizes: Sizes) -> int:
    """Kept until the very end: token ids and labels, tables of rotary positions, what the embedding keeps."""
    model, config = spec.model, spec.hf_config
    if model.traced is not None:
        return 0  # part of what was seen outside of all blocks
    rotary = 0 if model.learned_positions else 2 * model.head_dim * sizes.dtype_bytes * sizes.seq_len
    embedding = model.hidden_size * sizes.dtype_bytes if model.embedding_norm else 0
    if config.get("embd_pdrop", 0.1 if model.family in ("gpt2", "gpt_bigcode") else 0):
        embedding += model.hidden_size  # the mask of its dropout
    return rotary + (8 + embedding) * sizes.tokens


def _packed_inputs(spec: RunSpec, sizes: Sizes) -> int:
    """Inputs of a block's 8-bit matrices, which are there until the whole graph is gone.

    bitsandbytes 0.50 `autograd/_functions.py:MatMul8bitLt` keeps them as plain attributes, which neither
    autograd frees nor the hooks of non-reentrant checkpointing see.
    """
    model = spec.model
    if spec.options.quantization != "int8":
        return 0
    columns = 2 * model.hidden_size + model.num_heads * model.head_dim + product_width(model)
    return columns * sizes.dtype_bytes * sizes.tokens


def _kept_inputs(spec: RunSpec, sizes: Sizes) -> int:
    """Of those, what checkpointing cannot free."""
    if spec.options.checkpointing_reentrant:
        return 0
    return checkpointed_blocks(spec.model.num_layers, sizes.checkpoint_every) * _packed_inputs(spec, sizes)


def _accumulated(spec: RunSpec, sizes: Sizes) -> int:
    options = spec.options
    to_host = sizes.stage == 2 and options.offload_optimizer != "none"
    if options.grad_accum == 1 or sizes.stage == 3 or to_host:
        return 0
    held = sizes.held_gradients if sizes.stage == 2 else sizes.trainable
    return sizes.dtype_bytes * held


def bucket_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """ZeRO-1/2's reduce buckets: the whole configured size, whatever the model's; two with overlap.

    On the CPU only the pages that gradients touch are resident.
    """
    if sizes.stage not in (1, 2) or not sizes.zero.contiguous_gradients:
        return 0
    elements = sizes.zero.reduce_bucket_size
    if spec.on_cpu:
        return min(elements, sizes.trainable) * sizes.dtype_bytes
    return elements * sizes.dtype_bytes * (2 if sizes.zero.overlap_comm else 1)


def tied_head_gradient(walk: Walk) -> int:
    """A tied head's gradient waits for the embedding's before it can be reduced."""
    if walk.sizes.head_trained and walk.spec.model.tied_embeddings:
        return walk.sizes.head_params * walk.sizes.dtype_bytes
    return 0


def reduces_at_once(walk: Walk) -> bool:
    """Whether gradients go into the bucket as they come: at stage 2, and at stage 1 with overlap
    (`zero/stage_1_and_2.py:process_gradients`); else they all stay on the device, under offload too."""
    sizes = walk.sizes
    return sizes.stage == 2 or (sizes.stage == 1 and sizes.zero.overlap_comm and not walk.accumulated)


def with_resident(
    walk: Walk,
    *,
    activations: int,
    logits: int = 0,
    gradients: int = 0,
    workspace: int = 0,
    buffers: int = 0,
    rounding: int = 0,
    gathered: int | None = None,
) -> Bytes:
    """`gathered`: of the weights that ZeRO-3 gathered at most so much is still there; None: all."""
    states = walk.states
    held = states.gathered if gathered is None else min(states.gathered, gathered)
    found = {
        Component.PARAMETERS: states.parameters + held + states.secondary,
        Component.GRADIENTS: states.gradients_resident + gradients,
        Component.OPTIMIZER_STATE: states.optimizer,
        Component.MASTER_PARAMETERS: states.master,
        Component.ACTIVATIONS: activations,
        Component.LOGITS: logits,
        Component.COMMUNICATION_BUFFERS: states.bucket_resident + buffers,
        Component.WORKSPACE: states.workspace + states.scales + workspace,
    }
    return {**found, Component.ROUNDING: rounding} if rounding else found
