"""The numbers that every memory formula starts from, taken once from a run spec."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from llmtop.presets.liger import kernels_on
from llmtop.presets.spec import DTYPE_BYTES, ModelShape, RunSpec
from llmtop.presets.zero import ZeroSettings, zero_settings
from llmtop.profiler.cost.shape import Role, param_count, tensors
from llmtop.profiler.memory.lora import adapted, linear, lora_params

NF4_BLOCK, NF4_SCALES = 64, 256
"""Weights of a block, and blocks whose scales share one of their own, with double quantization."""
NF4_DATA_BYTES = 0.5
NF4_BYTES = NF4_DATA_BYTES + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_SCALES)
"""Per weight with double quantization: 4 bits, one byte per block of 64, one fp32 per 256 blocks.

QLoRA (arXiv 2305.14314, section 3) and bitsandbytes 0.50 `functional.py:quantize_4bit`."""
NF4_TABLE_BYTES = 4 * (16 + 256 + 1)
"""Of each matrix: the values of its 4-bit codes and of its scales' codes, and the mean of the scales."""
INT8_BYTES = 1.0
"""LLM.int8 stores one byte a weight."""
PACKED_BYTES = {"nf4": NF4_DATA_BYTES, "int8": INT8_BYTES}
"""Of a packed weight in its parameter, without scales."""


class Sizes(Struct, frozen=True, kw_only=True):
    """Counts in elements unless the name says bytes."""

    model: ModelShape
    zero: ZeroSettings
    stage: int
    ranks: int
    dtype_bytes: int
    """Of weights, gradients and activations."""
    tokens: int
    """Of one micro-batch on one GPU."""
    micro_batch: int
    seq_len: int
    trainable: int
    frozen: int
    frozen_bytes: int
    """Of all frozen weights as stored, before any sharding."""
    packed_bytes: int
    """Of the frozen weights, those stored in 4 or 8 bits, without their scales."""
    scale_bytes: int
    """Scales and tables of packed weights, which no parameter holds: nothing shards or offloads them."""
    lora_rank: int
    lora_modules: int
    """Adapted matrices in one block."""
    attention_adapted: bool
    mlp_adapted: bool
    shard: int
    """Trainable elements of the largest rank's share of optimizer state."""
    held_gradients: int
    """Elements of the whole tensors that overlap that share: ZeRO-1/2 keep whole tensors."""
    first_bucket: int
    """Elements in ZeRO-1's bucket when it is reduced for the first time."""
    layer_params: int
    """Trainable elements of one block."""
    largest_tensor: int
    """Trainable elements."""
    head_params: int
    """Elements of the output projection (the embedding's where tied)."""
    head_trained: bool
    wide_linear: int
    """Elements of the largest matrix of a block's MLP."""
    expert_tensor: int
    """Elements of the largest tensor of a block's routed experts, which has all of them; 0 without any."""
    experts: int
    """Elements of all their tensors: one module, which ZeRO-3 gathers at once."""
    liger: frozenset[str]
    """Liger's kernels that run, by the words of `presets.liger.KERNELS`."""
    checkpoint_every: int
    """Blocks 0, k, 2k, ... are recomputed in backward; 0: none is."""


@lru_cache(maxsize=1024)
def quantized_weights(model: ModelShape) -> int:
    """Weights that 4-bit and 8-bit loading packs: the blocks' matrices, not embeddings, head or norms."""
    return sum(group.total for group in linear(model))


@lru_cache(maxsize=1024)
def scale_bytes(model: ModelShape, quantization: str) -> int:
    """Scales and tables of all packed matrices.

    bitsandbytes 0.50 `functional.py:quantize_4bit`, `quantize_blockwise` (each matrix has a copy of both
    tables) and `nn/modules.py:Int8Params` (fp32 for each row).
    """
    if quantization == "none":
        return 0
    if quantization == "int8":
        return sum(4 * group.shape[0] * group.count for group in linear(model))
    return sum(_nf4_scales(group.numel) * group.count for group in linear(model))


def _nf4_scales(weights: int) -> int:
    """Of one matrix: a byte for each block, fp32 for each 256 of them, the tables."""
    blocks = -(-weights // NF4_BLOCK)
    return blocks + 4 * -(-blocks // NF4_SCALES) + NF4_TABLE_BYTES


def stored_bytes(
    frozen: int, packed: int, dtype_bytes: int, quantization: str, scales: int
) -> tuple[int, int]:
    """(packed, all) bytes of frozen weights, of which `packed` are stored in 4 or 8 bits with `scales` bytes
    beside them."""
    packed_bytes = round(packed * PACKED_BYTES[quantization]) if packed else 0
    return packed_bytes, packed_bytes + scales + (frozen - packed) * dtype_bytes


def _whole_tensor_share(model: ModelShape, ranks: int) -> int:
    """Elements of the tensors that overlap the first rank's 1/ranks of the flat buffer.

    A tensor that straddles the border counts whole (deepspeed 0.19.8
    `zero/stage_1_and_2.py:copy_grads_in_partition`).
    """
    total = param_count(model)
    return total if ranks == 1 else _prefix(model, -(-total // ranks), whole=True)


def _bucket_fill(model: ModelShape, bucket: int) -> int:
    """Elements that a reduce bucket holds when the next tensor no longer fits, in the model's order."""
    return min(param_count(model), _prefix(model, bucket, whole=False))


@lru_cache(maxsize=1024)
def _prefix(model: ModelShape, share: int, *, whole: bool) -> int:
    """Elements of the model's first tensors: until `share` is reached, or (not whole) while it is not passed.

    The flat buffer follows the model's order: embeddings, then blocks.
    """
    filled = 0
    groups = tensors(model)
    for group in groups:
        if not group.per_layer and group.role in (Role.EMBEDDING, Role.POSITION):
            if filled + group.total > share:
                return filled + group.total if whole else filled
            filled += group.total
    block = [
        (g.numel, g.count // model.num_layers) for g in groups if g.per_layer and g.count >= model.num_layers
    ]
    per_block = sum(numel * count for numel, count in block)
    if per_block == 0:
        return share
    filled += (share - filled) // per_block * per_block
    for numel, count in block:
        for _ in range(count):
            if filled >= share or (not whole and filled + numel > share):
                return filled
            filled += numel
    return filled


@lru_cache(maxsize=1024)
def _largest(model: ModelShape) -> int:
    return max(group.numel for group in tensors(model))


@lru_cache(maxsize=1024)
def _block_params(model: ModelShape) -> int:
    return sum(group.total for group in tensors(model) if group.per_layer) // model.num_layers


@lru_cache(maxsize=1024)
def _wide_linear(model: ModelShape) -> int:
    widths = [g.numel for g in tensors(model) if g.role is Role.MLP and len(g.shape) == 2]
    return max(widths, default=model.hidden_size * model.hidden_size)


@lru_cache(maxsize=1024)
def _experts(model: ModelShape) -> tuple[int, int]:
    """(the largest, all) of the three-dimensional tensors that one block's experts are."""
    found = [group.numel for group in tensors(model) if group.role is Role.EXPERT and len(group.shape) > 2]
    return max(found, default=0), sum(found)


def checkpointed_blocks(blocks: int, every: int) -> int:
    """How many of the lowest `blocks` blocks are recomputed: those numbered 0, `every`, ...; 0 means none."""
    return -(-blocks // every) if every else 0


def sizes_of(spec: RunSpec) -> Sizes:
    """Read every count off the spec. Cheap: what depends on the model alone is cached."""
    options, model = spec.options, spec.model
    ranks = spec.world_size
    dtype_bytes = DTYPE_BYTES[options.precision]
    total = param_count(model)
    zero = zero_settings(options.zero, options.deepspeed, model.hidden_size)
    expert_tensor, experts = _experts(model)
    if options.lora_rank:
        trainable = lora_params(model, options.lora_rank, options.lora_targets)
        frozen = total
        packed = quantized_weights(model) if options.quantization != "none" else 0
        scales = scale_bytes(model, options.quantization)
        packed_bytes, frozen_bytes = stored_bytes(frozen, packed, dtype_bytes, options.quantization, scales)
        groups = adapted(model, options.lora_targets)
        modules = sum(-(-group.count // model.num_layers) for group in groups)
        roles = {group.role for group in groups}
        layer_params = trainable // model.num_layers
        largest = max((options.lora_rank * max(group.shape) for group in groups), default=0)
        held = -(-trainable // ranks)
        bucket = min(trainable, zero.reduce_bucket_size)
    else:
        trainable, frozen, frozen_bytes, packed_bytes, scales, modules = total, 0, 0, 0, 0, 0
        roles = {Role.ATTENTION, Role.MLP}
        layer_params, largest = _block_params(model), _largest(model)
        held = _whole_tensor_share(model, ranks)
        bucket = _bucket_fill(model, zero.reduce_bucket_size)
    return Sizes(
        model=model,
        zero=zero,
        stage=options.zero,
        ranks=ranks,
        dtype_bytes=dtype_bytes,
        tokens=options.micro_batch * options.seq_len,
        micro_batch=options.micro_batch,
        seq_len=options.seq_len,
        trainable=trainable,
        frozen=frozen,
        frozen_bytes=frozen_bytes,
        packed_bytes=packed_bytes,
        scale_bytes=scales,
        lora_rank=options.lora_rank,
        lora_modules=modules,
        attention_adapted=Role.ATTENTION in roles,
        mlp_adapted=Role.MLP in roles,
        shard=-(-trainable // ranks),
        held_gradients=held,
        first_bucket=bucket,
        layer_params=layer_params,
        largest_tensor=largest,
        head_params=model.vocab_size * (model.embedding_dim or model.hidden_size),
        head_trained=options.lora_rank == 0,
        wide_linear=_wide_linear(model),
        expert_tensor=expert_tensor,
        experts=experts,
        liger=kernels_on(spec),
        checkpoint_every=options.checkpointing_every if options.gradient_checkpointing else 0,
    )
