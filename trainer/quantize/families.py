"""What each family is called in GGUF, which tensors it has there, and what llama.cpp takes for granted of it.

Read from llama.cpp's `src/models/*.cpp` (what it loads and assumes) and `conversion/*.py` (how numbers are
changed on the way), and from transformers' `models/<family>/` for the names in the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import ModelShape

_SILU = frozenset({"silu", "swish"})
_GELU = frozenset({"gelu_pytorch_tanh", "gelu", "gelu_new"})
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Family(Struct, frozen=True, kw_only=True):
    arch: str
    """In GGUF's words."""
    norms: tuple[str, ...] = _TWO
    """Of a block, beside those of queries and keys."""
    interleaved: bool = False
    """llama.cpp turns neighbours in a head where transformers turns its halves: rows change places."""
    plus_one: bool = False
    """A norm multiplies with 1 + weight; GGUF has the sum."""
    activations: frozenset[str] = _SILU
    biased: tuple[str, ...] = _QKV
    """Modules that may have a bias."""
    tied_only: bool = False
    """Its projection to logits is always the embedding."""
    splits_hidden: bool = False
    """Its heads together are as wide as the hidden size."""


_LLAMA = Family(
    arch="llama",
    interleaved=True,
    biased=(*_QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "qwen2": Family(arch="qwen2", splits_hidden=True),
    "qwen3": Family(arch="qwen3"),
    "gemma": Family(arch="gemma", plus_one=True, activations=_GELU, tied_only=True),
    "gemma2": Family(arch="gemma2", norms=_FOUR, plus_one=True, activations=_GELU, tied_only=True),
    "gemma3_text": Family(arch="gemma3", norms=_FOUR, plus_one=True, activations=_GELU),
    "phi3": Family(arch="phi3", biased=(), splits_hidden=True),
}
"""By `model_type`."""

_LARGE_GEMMA_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""27B, for which llama.cpp divides by another width."""
_PATTERN = {"gemma2": 2, "gemma3_text": 6}
"""Every so manieth layer sees everything, the others a window."""


def family_of(shape: ModelShape, where: str) -> Family:
    """Raises UsageError for an architecture that cannot be written."""
    family = FAMILIES.get(shape.family)
    if family is None:
        raise UsageError(
            f"{where}: {shape.family} cannot be written to GGUF",
            why=f"llmtop knows the layout of {', '.join(FAMILIES)} there",
            fix="--to int8 or --to nf4 takes any architecture of transformers; llama.cpp's own"
            " convert_hf_to_gguf.py knows more",
        )
    return family


def check_assumptions(config: dict[str, Any], shape: ModelShape, family: Family, where: str) -> None:
    """Raise UsageError where llama.cpp would compute something else from the file than the model does."""
    for what, why in _contradictions(config, shape, family):
        raise UsageError(
            f"{where}: {what} cannot be written to GGUF", why=why, fix="--to int8 or --to nf4 keeps it"
        )


def _contradictions(config: dict[str, Any], shape: ModelShape, family: Family) -> Iterator[tuple[str, str]]:
    if shape.activation not in family.activations:
        yield f"the activation {shape.activation}", f"llama.cpp computes {min(family.activations)} for it"
    if family.tied_only and not shape.tied_embeddings:
        yield "a projection to logits of its own", f"in {family.arch} llama.cpp takes the embedding for it"
    if family.splits_hidden and shape.num_heads * shape.head_dim != shape.hidden_size:
        yield (
            f"{shape.num_heads} heads of {shape.head_dim}",
            f"llama.cpp expects heads of {family.arch} to share the hidden size, {shape.hidden_size}",
        )
    if shape.family in _PATTERN:
        yield from _gemma(config, shape)


def _gemma(config: dict[str, Any], shape: ModelShape) -> Iterator[tuple[str, str]]:
    large = shape.num_layers == _LARGE_GEMMA_LAYERS[shape.family]
    expected = shape.hidden_size // shape.num_heads if large else shape.head_dim
    scalar = config.get("query_pre_attn_scalar", 256)
    if scalar != expected:
        yield f"query_pre_attn_scalar {scalar}", f"llama.cpp divides by the root of {expected}"
    if shape.family == "gemma2" and not shape.attention_softcap:
        yield "attention without a softcap", "llama.cpp always applies one to gemma2"
    if shape.family == "gemma3_text" and shape.attention_softcap:
        yield "attention with a softcap", "llama.cpp applies none to gemma3"
    every = _PATTERN[shape.family]
    kinds = config.get("layer_types")
    usual = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(shape.num_layers)]
    if (isinstance(kinds, list) and kinds != usual) or config.get("sliding_window_pattern", every) != every:
        yield "its order of layers", f"llama.cpp has every {every}th layer see everything"
    if not shape.sliding_window:
        yield "attention without a window", f"llama.cpp has a window in {shape.family}"


def notes(shape: ModelShape) -> tuple[str, ...]:
    """What whoever uses the file should know."""
    if shape.sliding_window and shape.family in ("mistral", "ministral", "qwen2", "qwen3", "phi3"):
        return (
            f"llama.cpp reads {shape.family} without its window of {shape.sliding_window:,} tokens: longer"
            " texts are answered differently",
        )
    return ()


def expected(shape: ModelShape, family: Family) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model, as transformers names it, with its shape."""
    hidden = shape.hidden_size
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        for module, size in _block(shape, family):
            found[f"model.layers.{layer}.{module}"] = size
    found["model.norm.weight"] = (hidden,)
    if not shape.tied_embeddings:
        found["lm_head.weight"] = (shape.vocab_size, hidden)
    return found


def _block(shape: ModelShape, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = shape.hidden_size, shape.intermediate_size
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for module, rows, columns, bias in (
        *_attention(shape, query, kv),
        ("self_attn.o_proj", hidden, query, shape.output_bias),
        *_mlp(shape, width),
        ("mlp.down_proj", hidden, width, shape.mlp_bias),
    ):
        yield f"{module}.weight", (rows, columns)
        if bias:
            yield f"{module}.bias", (rows,)
    if shape.qk_norm == "head":
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
    for norm in family.norms:
        yield f"{norm}.weight", (hidden,)


def _attention(shape: ModelShape, query: int, kv: int) -> list[tuple[str, int, int, bool]]:
    hidden, bias = shape.hidden_size, shape.qkv_bias
    if shape.fused_qkv:
        return [("self_attn.qkv_proj", query + 2 * kv, hidden, bias)]
    return [(module, rows, hidden, bias) for module, rows in zip(_QKV, (query, kv, kv), strict=True)]


def _mlp(shape: ModelShape, width: int) -> list[tuple[str, int, int, bool]]:
    hidden, bias = shape.hidden_size, shape.mlp_bias
    if shape.fused_gate_up:
        return [("mlp.gate_up_proj", 2 * width, hidden, bias)]
    return [("mlp.gate_proj", width, hidden, bias), ("mlp.up_proj", width, hidden, bias)]
