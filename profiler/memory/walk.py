"""The state of a walk through the backward pass, and what every point of it has beside its own bytes."""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.blocks import BlockBytes
from llmtop.profiler.memory.loss import LossBytes
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import Sizes
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
) -> Bytes:
    states = walk.states
    found = {
        Component.PARAMETERS: states.parameters + states.gathered + states.secondary,
        Component.GRADIENTS: states.gradients_resident + gradients,
        Component.OPTIMIZER_STATE: states.optimizer,
        Component.MASTER_PARAMETERS: states.master,
        Component.ACTIVATIONS: activations,
        Component.LOGITS: logits,
        Component.COMMUNICATION_BUFFERS: states.bucket_resident + buffers,
        Component.WORKSPACE: states.workspace + states.scales + workspace,
    }
    return {**found, Component.ROUNDING: rounding} if rounding else found
