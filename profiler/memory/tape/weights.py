"""The tensors of a model in its order, those of blocks with and without experts."""

from __future__ import annotations

from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.cost.shape import Role, TensorGroup, tensors
from llmtop.profiler.memory.lora import adapted
from llmtop.profiler.memory.sizes import INT8_BYTES, NF4_BYTES, Sizes

STORED = {"none": None, "int8": INT8_BYTES, "nf4": NF4_BYTES}
"""Bytes of a packed weight."""
_SPARSE = ("router", "experts.", "shared_expert")
_DENSE = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
"""How the names of tensors begin that blocks with experts have, and those without."""


def weights_of(spec: RunSpec, sizes: Sizes) -> tuple[list[int], list[int]]:
    """Elements of each trained tensor and bytes of each frozen one, in the model's order."""
    ordered = _in_order(spec.model)
    if not sizes.lora_rank:
        return [group.numel for group in ordered], []
    names = {group.name for group in adapted(spec.model, spec.options.lora_targets)}
    trained: list[int] = []
    frozen: list[int] = []
    packed = STORED[spec.options.quantization]
    for group in ordered:
        each = packed if packed is not None and is_packed(group) else sizes.dtype_bytes
        frozen.append(round(group.numel * each))
        if group.name in names:
            trained += [sizes.lora_rank * group.shape[1], sizes.lora_rank * group.shape[0]]
    return trained, frozen


def is_packed(group: TensorGroup) -> bool:
    """Whether quantization packs it, and an adapter may sit on it: a matrix of attention or MLP."""
    return group.per_layer and len(group.shape) == 2 and group.role in (Role.ATTENTION, Role.MLP)


def _in_order(shape: ModelShape) -> list[TensorGroup]:
    """One entry a tensor: the embedding, the blocks one after another, what follows them."""
    groups = tensors(shape)
    first = [g for g in groups if not g.per_layer and g.role in (Role.EMBEDDING, Role.POSITION)]
    last = [g for g in groups if not g.per_layer and g.role not in (Role.EMBEDDING, Role.POSITION)]
    dense = shape.moe.first_dense_layers if shape.moe is not None else 0
    blocks = of_block(shape, 0) * dense + of_block(shape, dense) * (shape.num_layers - dense)
    return [*first, *blocks, *last]


def of_block(shape: ModelShape, layer: int) -> list[TensorGroup]:
    """The tensors of one block, its norms last."""
    is_dense = shape.moe is None or layer < shape.moe.first_dense_layers
    dense = shape.moe.first_dense_layers if shape.moe is not None else shape.num_layers
    found: list[TensorGroup] = []
    for group in tensors(shape):
        if not group.per_layer:
            continue
        # Of a traced model no name says which blocks it is in.
        if shape.moe is not None and group.name.startswith(_SPARSE):
            found += [] if is_dense else [group]
        elif group.name.startswith(_DENSE):
            found += [group] * (group.count // dense) if is_dense else []
        else:
            found += [group] * (group.count // shape.num_layers)
    found.sort(key=lambda group: group.role is Role.NORM)
    return found
