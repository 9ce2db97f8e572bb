"""Names an allocation by its size: what of a run, by the prediction's own numbers, has just that many bytes.

The large allocations of a step are few, and their sizes are products of the model's shape, so that two of
one size in one phase are rare. Sizes are those that torch asks the driver for (`segment_bytes`), and a
message has them rounded: two that print alike cannot be told apart, and both are named.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.loss import liger_chunk_tokens
from llmtop.profiler.memory.pool import LARGE_SEGMENT, segment_bytes
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import Sizes, checkpointed_blocks, sizes_of
from llmtop.profiler.memory.states import sub_group_elements
from llmtop.profiler.record.failureevents import MemoryShortage

NEAR = 0.005
"""Share of the size by which padding and groups of weights make a flat tensor differ from the count."""
MOST = 3

START, FORWARD, BACKWARD, OPTIMIZER = "start", "forward", "backward", "optimizer"
_PASSES = (FORWARD, BACKWARD)
_STEP = {"data": FORWARD, FORWARD: FORWARD, BACKWARD: BACKWARD, OPTIMIZER: OPTIMIZER}
"""Phase of a step to the part of the run that its allocations belong to; every other stage is start-up."""


class KnownAllocation(Struct, frozen=True, kw_only=True):
    """One tensor that a run makes."""

    name: str
    """In words, with the numbers that make its size."""
    component: Component
    size_bytes: int
    parts: tuple[str, ...]
    """When it is made: `start`, `forward`, `backward`, `optimizer`."""


def identify(spec: RunSpec, shortage: MemoryShortage, stage: str | None) -> tuple[KnownAllocation, ...]:
    """What has the size that was asked for, the nearest first; empty where nothing large has.

    `stage` is that of start-up, or the phase of a step; None: not known.
    """
    wanted = shortage.requested_bytes
    if wanted is None or not shortage.on_host and wanted <= LARGE_SEGMENT:
        return ()  # of small tensors there are too many
    part = None if stage is None else _STEP.get(stage, START)
    within = shortage.resolution_bytes / 2
    found: dict[str, tuple[float, KnownAllocation]] = {}
    for known in known_allocations(spec):
        if part is not None and part not in known.parts:
            continue
        size = known.size_bytes if shortage.on_host else segment_bytes(known.size_bytes)
        off = max(0.0, abs(size - wanted) - within)
        if off <= NEAR * wanted and (known.name not in found or off < found[known.name][0]):
            found[known.name] = (off, known)
    nearest = sorted(found.values(), key=lambda pair: pair[0])
    # Where one prints just like the request, those that are only near are others.
    exact = [known for off, known in nearest if off == 0]
    return tuple((exact or [known for _, known in nearest])[:MOST])


def known_allocations(spec: RunSpec) -> Iterator[KnownAllocation]:
    """The large tensors that one rank of the run makes, one by one."""
    sizes = sizes_of(spec)
    yield from _loss(spec, sizes)
    yield from _activations(spec, sizes)
    yield from _weights(sizes)
    yield from _states(sizes)
    yield from _communication(sizes)


def _known(name: str, component: Component, size_bytes: int, *parts: str) -> KnownAllocation:
    return KnownAllocation(name=name, component=component, size_bytes=size_bytes, parts=parts)


def _type(width: int) -> str:
    return "fp32" if width == 4 else "16-bit"


def _loss(spec: RunSpec, sizes: Sizes) -> Iterator[KnownAllocation]:
    model, width, tokens = spec.model, sizes.dtype_bytes, sizes.tokens
    shape = f"{tokens:,} tokens x {model.vocab_size:,} words"
    if "fused_linear_cross_entropy" in sizes.liger:
        chunk = liger_chunk_tokens(tokens, model.vocab_size, model.hidden_size)
        name = f"the logits of one part of Liger's fused loss ({chunk:,} tokens x {model.vocab_size:,} words)"
        yield _known(name, Component.LOGITS, chunk * model.vocab_size * width, *_PASSES)
        return
    elements = tokens * model.vocab_size
    yield _known(f"the logits ({shape}, {_type(width)})", Component.LOGITS, elements * width, *_PASSES)
    if width != 4:
        name = f"the logits in fp32 for the loss ({shape})"
        yield _known(name, Component.LOGITS, 4 * elements, FORWARD)
        name = f"the gradient of the logits in fp32 ({shape})"
        yield _known(name, Component.LOGITS, 4 * elements, BACKWARD)


def _activations(spec: RunSpec, sizes: Sizes) -> Iterator[KnownAllocation]:
    model, width, tokens = spec.model, sizes.dtype_bytes, sizes.tokens
    wide = model.intermediate_size
    rows = (
        (f"one block's hidden states ({tokens:,} tokens x {model.hidden_size:,})", model.hidden_size),
        (f"a block's MLP activations ({tokens:,} tokens x {wide:,})", wide),
        (
            f"a block's queries ({tokens:,} tokens x {model.num_heads} heads)",
            model.num_heads * model.head_dim,
        ),
    )
    for name, columns in rows:
        yield _known(name, Component.ACTIVATIONS, tokens * columns * width, *_PASSES)
        if width != 4:
            yield _known(f"{name}, in fp32", Component.ACTIVATIONS, 4 * tokens * columns, *_PASSES)
    if spec.options.attention == "eager":
        scores = sizes.micro_batch * model.num_heads * sizes.seq_len**2
        heads = f"{sizes.micro_batch} x {model.num_heads} heads x {sizes.seq_len:,} x {sizes.seq_len:,}"
        name = f"a block's attention scores ({heads}, {_type(width)})"
        yield _known(name, Component.ACTIVATIONS, scores * width, *_PASSES)
        if width != 4:
            name = f"a block's attention scores in fp32 ({heads})"
            yield _known(name, Component.ACTIVATIONS, 4 * scores, *_PASSES)
    if sizes.checkpoint_every:
        blocks = checkpointed_blocks(model.num_layers, sizes.checkpoint_every)
        name = f"the checkpoints of all {blocks} blocks that are recomputed"
        yield _known(name, Component.ACTIVATIONS, blocks * tokens * model.hidden_size * width, FORWARD)


def _weights(sizes: Sizes) -> Iterator[KnownAllocation]:
    width, whole = sizes.dtype_bytes, sizes.trainable + sizes.frozen
    kind = Component.PARAMETERS
    everything = f"all {whole:,} weights in {_type(width)}"
    yield _known(everything, kind, whole * width, START)
    if sizes.stage in (1, 2):
        name = f"the flat copy of all {sizes.trainable:,} trained weights ({_type(width)})"
        yield _known(name, kind, sizes.trainable * width, START)
    for name, elements in (
        (f"the weights of the embedding or the head ({sizes.head_params:,})", sizes.head_params),
        (f"a matrix of a block's MLP ({sizes.wide_linear:,} weights)", sizes.wide_linear),
    ):
        yield _known(name, kind, elements * width, START)
        if sizes.stage == 3 and sizes.ranks > 1:
            yield _known(f"{name}, gathered from all ranks", kind, elements * width, *_PASSES)
        yield _known(f"the gradient of {name}", Component.GRADIENTS, elements * width, BACKWARD)


def _states(sizes: Sizes) -> Iterator[KnownAllocation]:
    width = sizes.dtype_bytes
    sharded = sizes.stage > 0 and sizes.ranks > 1
    count = sizes.shard if sizes.stage else sizes.trainable
    whose = "this rank's share" if sharded else "all weights"
    of = f"of {whose} ({count:,} weights)"
    yield _known(f"the fp32 master weights {of}", Component.MASTER_PARAMETERS, 4 * count, START)
    yield _known(f"a moment of the optimizer in fp32 {of}", Component.OPTIMIZER_STATE, 4 * count, OPTIMIZER)
    yield _known(f"the gradients {of} in fp32", Component.GRADIENTS, 4 * count, OPTIMIZER)
    if width != 4:
        yield _known(f"the flat gradients {of} in 16-bit", Component.GRADIENTS, width * count, OPTIMIZER)
    group = sub_group_elements(sizes)
    if sizes.stage == 3 and group < count:
        name = f"a sub-group of ZeRO-3 in fp32 ({group:,} weights)"
        yield _known(name, Component.WORKSPACE, 4 * group, OPTIMIZER)


def _communication(sizes: Sizes) -> Iterator[KnownAllocation]:
    width, bucket = sizes.dtype_bytes, sizes.zero.reduce_bucket_size
    kind = Component.COMMUNICATION_BUFFERS
    name = f"a reduce bucket ({bucket:,} gradients; deepspeed.zero_optimization.reduce_bucket_size)"
    if sizes.stage:
        yield _known(name, kind, bucket * width, START, BACKWARD)
    if sizes.stage in (1, 2) and sizes.ranks > 1:
        name = f"the {sizes.trainable:,} updated weights, gathered from all ranks"
        yield _known(name, kind, sizes.trainable * width, OPTIMIZER)
