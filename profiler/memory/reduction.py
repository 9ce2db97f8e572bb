"""The end of the backward pass: the embedding's gradient, and the last reduction of gradients."""

from __future__ import annotations

from llmtop.profiler.memory.flatcopy import before_embedding_elements
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.walk import (
    Bytes,
    Walk,
    bucket_bytes,
    reduces_at_once,
    tied_head_gradient,
    with_resident,
)

NORM_ELEMENTS = 250_000_000
"""Of a gradient whose norm ZeRO-3 takes at once: `zero/stage3.py:_constant_buffered_norm2`."""
ALLREDUCE_ELEMENTS = 500_000_000
"""`MEMORY_OPT_ALLREDUCE_SIZE` of deepspeed 0.19.8, `runtime/engine.py`."""


def end_of_backward(walk: Walk) -> Bytes:
    """The embedding's gradient, or what the last reduction makes: whichever is more."""
    if walk.spec.on_cpu:
        return _reduced_on_cpu(walk)
    candidates = (_at_embedding(walk), _at_reduction(walk))
    return max(candidates, key=lambda components: sum(components.values()))


def _whole_gradients(walk: Walk) -> int:
    """Gradients that stages 0 and 1 hold at the end, those of earlier micro-batches included: later ones are
    added to them in place."""
    return walk.sizes.dtype_bytes * walk.sizes.trainable


def _others_exceed_bucket(walk: Walk) -> bool:
    """Whether the bucket has been reduced before the embedding's gradient comes."""
    sizes = walk.sizes
    embedding = sizes.head_params if sizes.head_trained else 0
    return sizes.trainable - embedding > sizes.zero.reduce_bucket_size


def _exceeds_bucket(sizes: Sizes) -> bool:
    """Whether the embedding's gradient is reduced as it is, so that it waits beside the bucket."""
    return sizes.head_params > sizes.zero.reduce_bucket_size


def _at_embedding(walk: Walk) -> Bytes:
    """A tied one's gradient is the sum of two: that of the head, which waited, and its own, beside both."""
    sizes, offloaded = walk.sizes, walk.spec.options.offload_optimizer != "none"
    embedding = sizes.head_params * sizes.dtype_bytes if sizes.head_trained else 0
    tied = bool(tied_head_gradient(walk))
    # ZeRO-3's own products give gradients that autograd adds into; so does Liger's fused loss, but not in the
    # first two steps, in which what it saves is counted, as an alias (`probes/activations.py:to_keep`).
    in_place = sizes.stage == 3 and "fused_linear_cross_entropy" not in sizes.liger
    gradients, earlier = 0, walk.accumulated
    if sizes.stage < 3 and not reduces_at_once(walk):
        gradients = 0 if earlier else _whole_gradients(walk) - embedding
    elif sizes.stage < 3 and not offloaded and _others_exceed_bucket(walk):
        gradients = sizes.dtype_bytes * sizes.held_gradients
    passing = walk.block.gradient * sizes.tokens
    return with_resident(
        walk,
        activations=walk.constant,
        gradients=earlier + gradients + embedding * (2 if tied else 1),
        workspace=passing if in_place or not tied else max(passing, embedding),
        buffers=bucket_bytes(walk.spec, sizes),
        # ZeRO-3 releases a weight after its last use of a step (deepspeed 0.19.8,
        # `zero/partitioned_param_coordinator.py:release_sub_module`).
        gathered=sizes.head_params * sizes.dtype_bytes,
    )


def _at_reduction(walk: Walk) -> Bytes:
    sizes, width = walk.sizes, walk.sizes.dtype_bytes
    buffers = bucket_bytes(walk.spec, sizes)
    gradients, workspace = walk.accumulated, 0
    if sizes.stage == 0:
        gradients = _whole_gradients(walk)
        if sizes.ranks > 1:
            # The all-reduce flattens gradients in pieces of at most 5e8 elements
            # (`engine.py:allreduce_bucket`).
            buffers += width * min(sizes.trainable, ALLREDUCE_ELEMENTS)
    elif sizes.stage < 3:
        gradients, workspace = _reduced_gradients(walk)
    else:
        return _last_reduced(walk)
    return with_resident(
        walk, activations=walk.constant, gradients=gradients, workspace=workspace, buffers=buffers
    )


def to_host_bytes(sizes: Sizes, elements: int) -> int:
    """What a gradient of ZeRO-3 takes on its way to the host: its part is copied out of the bucket, and the
    norm taken in fp64 or, if that is more, all of it cast (deepspeed 0.19.8, `stage3.py:partition_grads`)."""
    part, width = -(-elements // sizes.ranks), sizes.dtype_bytes
    return width * part + max(8 * min(part, NORM_ELEMENTS), 4 * part if width != 4 else 0)


def _last_reduced(walk: Walk) -> Bytes:
    """ZeRO-3's last flat copy: with the embedding's gradient in it, or beside it, and that one after it."""
    sizes, width = walk.sizes, walk.sizes.dtype_bytes
    offloaded = walk.spec.options.offload_optimizer != "none"
    held, fits = before_embedding_elements(sizes)
    embedding = sizes.head_params if sizes.head_trained else 0
    alone = to_host_bytes(sizes, sizes.largest_tensor) if offloaded else 0
    if fits:
        passing, gradients, flat = alone, 0, held + embedding
    else:
        beside = to_host_bytes(sizes, sizes.wide_linear) if offloaded else 0
        first, second = width * (held + embedding) + beside, alone
        if embedding > sizes.zero.reduce_bucket_size:
            second += width * embedding
        passing, gradients, flat = (beside, width * embedding, held) if first >= second else (second, 0, 0)
    return with_resident(
        walk,
        activations=walk.constant,
        gradients=walk.accumulated + gradients,
        workspace=passing,
        buffers=bucket_bytes(walk.spec, sizes) + width * flat,
        # A head that the loss reads by itself stays gathered to the end.
        gathered=sizes.head_params * width if walk.loss.reads_head else 0,
    )


def _reduced_gradients(walk: Walk) -> tuple[int, int]:
    """Gradients beside the bucket of stages 1 and 2 when it is reduced, and what passes then."""
    sizes, width = walk.sizes, walk.sizes.dtype_bytes
    offloaded = walk.spec.options.offload_optimizer != "none"
    share = 0 if offloaded else width * sizes.held_gradients
    # Norms are taken in fp64, tensor by tensor, on the way to the host.
    norm = 8 * sizes.largest_tensor if offloaded else 0
    if not reduces_at_once(walk):
        # All gradients are reduced now. When the bucket is full for the first time, what it holds is gone
        # from the full gradients, and room for the whole share is made beside them.
        gradients = _whole_gradients(walk) - width * sizes.first_bucket + share
        return _with_flat(walk, gradients, share, norm) if _everything_fits(sizes) else (gradients, norm)
    if not sizes.head_trained or _everything_fits(sizes):
        return _with_flat(walk, walk.accumulated + share, share, norm)
    waiting = walk.accumulated + width * sizes.head_params
    before, flat = _for_embedding(sizes)
    if offloaded:
        others = norm if _exceeds_bucket(sizes) else 8 * sizes.wide_linear
        beside, alone = max(flat, others), norm - width * sizes.head_params
        return waiting, max(beside, alone)
    return (waiting + share, flat) if before else (waiting + max(share, flat), 0)


def _everything_fits(sizes: Sizes) -> bool:
    return sizes.trainable <= sizes.zero.reduce_bucket_size


def _with_flat(walk: Walk, gradients: int, share: int, norm: int) -> tuple[int, int]:
    """The parts of all ranks are made one tensor to be reduced, before room for the share, which is among the
    gradients, is made."""
    sizes = walk.sizes
    flat = sizes.dtype_bytes * sizes.trainable if sizes.ranks > 1 and _everything_fits(sizes) else 0
    if flat <= share:
        return gradients, norm
    return gradients - share, max(flat, norm)


def _for_embedding(sizes: Sizes) -> tuple[bool, int]:
    """Whether the bucket was reduced before it is emptied for the embedding's gradient, and the bytes of the
    one flat tensor that the parts of several ranks in it then are."""
    bucket, embedding = sizes.zero.reduce_bucket_size, sizes.head_params
    others = sizes.trainable - embedding
    before = others > bucket
    held = others % bucket if before else others
    spans = embedding // sizes.shard != (embedding + held - 1) // sizes.shard
    return before, sizes.dtype_bytes * held if sizes.ranks > 1 and spans else 0


def _reduced_on_cpu(walk: Walk) -> Bytes:
    """Full gradients give way page by page to the bucket; a bucket that holds shares of several ranks is
    reduced in a flattened copy before the own share is copied out."""
    sizes, width = walk.sizes, walk.sizes.dtype_bytes
    offloaded = walk.spec.options.offload_optimizer != "none"
    embedding = sizes.head_params * width if sizes.head_trained else 0
    gradients = 0 if sizes.stage == 3 or offloaded else width * sizes.trainable
    buffers, beside = bucket_bytes(walk.spec, sizes), 0
    if sizes.stage == 0 and sizes.ranks > 1:
        buffers += width * min(sizes.trainable, ALLREDUCE_ELEMENTS)
    elif sizes.stage in (1, 2):
        flattened = buffers if sizes.ranks > 1 else 0
        gradients = max(width * sizes.held_gradients - flattened, 0)
        buffers += flattened
    elif sizes.stage == 3:
        beside = tied_head_gradient(walk) + embedding
    return with_resident(
        walk,
        activations=walk.constant,
        gradients=walk.accumulated + gradients + beside,
        workspace=walk.block.gradient * sizes.tokens,
        buffers=buffers,
    )
