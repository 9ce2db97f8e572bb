"""What a model needs to be loaded, at each precision: weights, cache of keys and values, the rest.

Weights in GGUF follow llama.cpp (`ggml/src/ggml-common.h` for the bytes of a block, `src/llama-quant.cpp:
llama_tensor_get_type_impl` for which tensor gets which type); 8 and 4 bits otherwise are bitsandbytes'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import NamedTuple

from msgspec import Struct

from llmtop.presets.spec import ModelShape
from llmtop.profiler.cost.shape import Role, TensorGroup, param_count, tensors
from llmtop.profiler.memory.allocator import CONTEXT_BYTES, STEP_BYTES
from llmtop.profiler.memory.sizes import quantized_weights, scale_bytes, stored_bytes

PROMPT_TOKENS = 512
"""Of a prompt that are read at a time, as llama.cpp (`n_ubatch`) and chunked prefill elsewhere do."""
CACHE_BYTES = 2
"""Of a number in the cache: 16 bits whatever the weights have."""


class _Block(NamedTuple):
    weights: int
    bytes: int


_BLOCKS = {
    "F32": _Block(1, 4),
    "F16": _Block(1, 2),
    "BF16": _Block(1, 2),
    "Q8_0": _Block(32, 34),
    "Q6_K": _Block(256, 210),
    "Q5_K": _Block(256, 176),
    "Q5_1": _Block(32, 24),
    "Q5_0": _Block(32, 22),
    "Q4_1": _Block(32, 20),
    "Q4_K": _Block(256, 144),
    "Q4_0": _Block(32, 18),
}
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For rows that are no whole number of 256 weights."""
_BASE = {"Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K", "Q4_0": "Q4_0"}
"""GGUF's names of mixtures: the type of most of their tensors."""
WRITTEN_KINDS = ("F32", "BF16", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""What `quantize` writes, the most bits first: the types that gguf's Python package packs for any model."""


class Loaded(Struct, frozen=True, kw_only=True):
    """One precision. Bytes of one GPU that holds the whole model."""

    form: str
    """`bf16`, `int8`, `nf4`, or `gguf:` and llama.cpp's name."""
    weights_bytes: int
    cache_bytes: int
    other_bytes: int
    """CUDA's context and kernels, logits, and what a piece of a prompt needs on its way."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.other_bytes


def loaded(model: ModelShape, *, context: int, requests: int = 1) -> tuple[Loaded, ...]:
    """Every precision, the largest first. `context` tokens are kept for each of `requests`."""
    cache = cache_bytes(model, context) * requests
    other = _other_bytes(model, min(context, PROMPT_TOKENS), requests)
    return tuple(
        Loaded(form=form, weights_bytes=weigh(model), cache_bytes=cache, other_bytes=other)
        for form, weigh in FORMS.items()
    )


def loaded_as(model: ModelShape, form: str, weights_bytes: int, *, context: int, requests: int = 1) -> Loaded:
    """One precision, by the bytes that its weights have or will have."""
    return Loaded(
        form=form,
        weights_bytes=weights_bytes,
        cache_bytes=cache_bytes(model, context) * requests,
        other_bytes=_other_bytes(model, min(context, PROMPT_TOKENS), requests),
    )


def cache_bytes(model: ModelShape, context: int) -> int:
    """Keys and values of one sequence, as transformers keeps them: latent attention's heads expanded.

    A model with a window is taken to keep all tokens, as transformers' default cache does for most.
    """
    if model.mla is not None:
        key = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
        per_layer = model.num_heads * (key + model.mla.v_head_dim)
    else:
        per_layer = 2 * model.num_kv_heads * model.head_dim
    return model.num_layers * per_layer * CACHE_BYTES * context


def gguf_bytes(model: ModelShape, mixture: str) -> int:
    """Tensor data of a GGUF file; its metadata, mostly the vocabulary, is some MB more."""
    return sum(_stored(shape, kind) * count for shape, kind, count in _gguf_tensors(model, mixture))


def written_gguf_bytes(model: ModelShape, kind: str) -> int:
    """Tensor data of a file that `quantize` writes, one of `WRITTEN_KINDS`, without RoPE's own factors."""
    total = 0
    for group in tensors(model):
        is_router = group.role is Role.ROUTER
        stored = written_kind(group.shape, kind, is_output=_is_output(group, model), is_router=is_router)
        total += _bytes(group.shape, stored) * group.count
    return total


def written_kind(
    shape: tuple[int, ...], kind: str, *, is_output: bool = False, is_router: bool = False
) -> str:
    """The type that `quantize` stores a tensor in: norms and biases whole, logits in 8 bits at least.

    Where llama.cpp packs the projection to logits to 6 bits; only its own code packs to those. What chooses
    experts stays whole too, as there.
    """
    if len(shape) == 1 or is_router:
        return "F32"
    if is_output and _BLOCKS[kind].bytes / _BLOCKS[kind].weights < 1:
        kind = "Q8_0"
    return _whole_blocks(shape, kind)


def stored_bytes_of(shape: tuple[int, ...], kind: str) -> int:
    """Of a tensor whose rows are whole blocks of that type."""
    return _bytes(shape, kind)


def packed_bytes(model: ModelShape, quantization: str) -> int:
    """Weights by bitsandbytes: `int8` or `nf4`, what it leaves alone in 16 bits."""
    return _packed(model, quantization)


def _gguf_tensors(model: ModelShape, mixture: str) -> Iterator[tuple[tuple[int, ...], str, int]]:
    """(shape, type, how many)."""
    base, layers = _BASE[mixture], model.num_layers
    better = sum(_gets_more_bits(layer, layers) for layer in range(layers))
    for group in tensors(model):
        if len(group.shape) == 1 or group.role is Role.ROUTER:
            yield group.shape, "F32", group.count
        elif _is_output(group, model):
            yield group.shape, base if base == "Q8_0" else "Q6_K", group.count
        elif mixture.endswith("_M") and group.name in _IMPROVED and group.count >= layers:
            more = group.count // layers * better
            yield group.shape, "Q6_K", more
            yield group.shape, base, group.count - more
        else:
            yield group.shape, base, group.count


_IMPROVED = frozenset({"v_proj", "down_proj"})


def _gets_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _is_output(group: TensorGroup, model: ModelShape) -> bool:
    """The projection to logits; a tied embedding is it."""
    wanted = Role.EMBEDDING if model.tied_embeddings else Role.HEAD
    return group.role is wanted and not group.per_layer and model.vocab_size in group.shape


def _stored(shape: tuple[int, ...], kind: str) -> int:
    return _bytes(shape, _whole_blocks(shape, kind))


def _whole_blocks(shape: tuple[int, ...], kind: str) -> str:
    kinds = (kind, _INSTEAD.get(kind, "F16"), "F16")
    return next(each for each in kinds if shape[-1] % _BLOCKS[each].weights == 0)


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    block = _BLOCKS[kind]
    return prod(shape) // block.weights * block.bytes


def _other_bytes(model: ModelShape, tokens: int, requests: int) -> int:
    width = max(model.intermediate_size, model.hidden_size)
    passing = tokens * (3 * width + 4 * model.hidden_size) * CACHE_BYTES
    return CONTEXT_BYTES + STEP_BYTES + 4 * model.vocab_size * requests + passing


def _packed(model: ModelShape, quantization: str) -> int:
    scales = scale_bytes(model, quantization)
    return stored_bytes(param_count(model), quantized_weights(model), 2, quantization, scales)[1]


FORMS: dict[str, Callable[[ModelShape], int]] = {
    "bf16": lambda model: 2 * param_count(model),
    "int8": partial(_packed, quantization="int8"),
    "gguf:Q8_0": partial(gguf_bytes, mixture="Q8_0"),
    "gguf:Q6_K": partial(gguf_bytes, mixture="Q6_K"),
    "gguf:Q5_K_M": partial(gguf_bytes, mixture="Q5_K_M"),
    "nf4": partial(_packed, quantization="nf4"),
    "gguf:Q4_K_M": partial(gguf_bytes, mixture="Q4_K_M"),
    "gguf:Q4_0": partial(gguf_bytes, mixture="Q4_0"),
}
"""Precision to the bytes of a model's weights."""
