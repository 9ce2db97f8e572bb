"""The flat copy in which ZeRO-3 reduces what its bucket holds, rank by rank in parts.

deepspeed 0.19.8, `runtime/comm/coalesced_collectives.py:reduce_scatter_coalesced`: several gradients are
joined by `torch.cat` beside the bucket that they lie in.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from llmtop.presets.spec import ModelShape
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.tape.weights import of_block


class Fill(Struct, frozen=True):
    """One time that the bucket is reduced before the end of the backward pass."""

    blocks_done: int
    elements: int
    largest: int
    """Elements of the largest gradient in it."""
    left: float
    """Of the block after those, the share of weights whose gradients are still to come."""


def fills(sizes: Sizes) -> tuple[Fill, ...]:
    """The first reduction and the largest one, which come while blocks are differentiated."""
    return () if sizes.stage != 3 or sizes.lora_rank else _filled(sizes)[0]


def before_embedding_elements(sizes: Sizes) -> tuple[int, bool]:
    """What the bucket holds when the embedding's gradient comes, and whether that fits beside it."""
    if sizes.lora_rank:
        return min(sizes.trainable, sizes.zero.reduce_bucket_size), True
    held = _filled(sizes)[1]
    return held, held + sizes.head_params <= sizes.zero.reduce_bucket_size


def _filled(sizes: Sizes) -> tuple[tuple[Fill, ...], int]:
    model = sizes.model
    head = 0 if model.tied_embeddings or not sizes.head_trained else sizes.head_params
    return _walked(_matrices(model), model.num_layers, head, sizes.zero.reduce_bucket_size)


@lru_cache(maxsize=64)
def _matrices(model: ModelShape) -> tuple[int, ...]:
    """Elements of the last block's weights, the last one first; where first blocks are dense it is one with
    experts, as most are."""
    last = of_block(model, model.num_layers - 1)
    return tuple(group.numel for group in reversed(last) if len(group.shape) > 1)


@lru_cache(maxsize=256)
def _walked(matrices: tuple[int, ...], layers: int, head: int, bucket: int) -> tuple[tuple[Fill, ...], int]:
    """The first reduction and the largest one before the embedding's gradient comes, and what the bucket
    then holds."""
    found: list[Fill] = []
    held, block = head if head <= bucket else 0, sum(matrices)
    largest = held
    for done in range(layers):
        left = block
        for elements in matrices:
            if held + elements > bucket:
                if held:
                    found.append(Fill(done, held, largest, left / block))
                held = largest = 0
            held, largest = held + elements, max(largest, elements)
            left -= elements
    most = max(found, key=lambda fill: fill.elements, default=None)
    told = () if most is None else (found[0],) if most == found[0] else (found[0], most)
    return told, held
