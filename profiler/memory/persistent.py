"""Small weights that ZeRO-3 keeps whole on every rank, beside their shards.

deepspeed 0.19.8 `runtime/zero/parameter_offload.py:mark_persistent_parameters` marks every parameter of at
most `param_persistence_threshold` elements, as long as all of them stay below `model_persistence_threshold`;
the coordinator never releases these (`partitioned_param_coordinator.py:__params_to_release`), and after each
step they are gathered again (`stage3.py:_post_step`). Most adapters are that small, and all norms and biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct

from llmtop.presets.spec import DTYPE_BYTES, ModelShape, RunSpec
from llmtop.profiler.cost.shape import tensors
from llmtop.profiler.memory.lora import adapted, linear
from llmtop.profiler.memory.sizes import NF4_DATA_BYTES, Sizes


class Persistent(Struct, frozen=True):
    """Elements, as the parameters count them: four weights of 4 bits are one of 16."""

    trained: int
    frozen: int
    packed: int
    """Of the frozen ones, those of packed weights."""


class _Group(Struct, frozen=True):
    elements: int
    count: int
    kind: str


def persistent(spec: RunSpec, sizes: Sizes) -> Persistent:
    """Of the whole model; nothing below stage 3."""
    if sizes.stage != 3:
        return Persistent(0, 0, 0)
    options, zero = spec.options, sizes.zero
    return _persistent(
        spec.model,
        _Adapters(options.lora_rank, options.lora_targets),
        _per_element(spec),
        zero.param_persistence_threshold,
        zero.model_persistence_threshold,
    )


class _Adapters(Struct, frozen=True):
    rank: int
    targets: str


def _per_element(spec: RunSpec) -> int:
    """Packed weights in one element of their parameter; 0 where none are packed."""
    if spec.options.quantization == "none":
        return 0
    return round(DTYPE_BYTES[spec.options.precision] / NF4_DATA_BYTES)


@lru_cache(maxsize=1024)
def _persistent(
    model: ModelShape, adapters: _Adapters, per_element: int, most: int, most_of_model: int
) -> Persistent:
    found = {"trained": 0, "frozen": 0, "packed": 0}
    room = most_of_model
    for group in _groups(model, adapters, per_element):
        if group.elements > most:
            continue
        count = min(group.count, room // group.elements)
        found[group.kind] += count * group.elements
        room -= count * group.elements
    return Persistent(found["trained"], found["frozen"] + found["packed"], found["packed"])


def _groups(model: ModelShape, adapters: _Adapters, per_element: int) -> Iterator[_Group]:
    if not adapters.rank:
        yield from (_Group(group.numel, group.count, "trained") for group in tensors(model))
        return
    packed = {group.name for group in linear(model)} if per_element else set()
    for group in tensors(model):
        if group.name in packed:
            yield _Group(-(-group.numel // per_element), group.count, "packed")
        else:
            yield _Group(group.numel, group.count, "frozen")
    for group in adapted(model, adapters.targets):
        yield from (_Group(adapters.rank * side, group.count, "trained") for side in group.shape)
