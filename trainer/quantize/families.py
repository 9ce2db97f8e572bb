"""What each family is called in GGUF, which tensors it has there, and what llama.cpp takes for granted of it.

Read from llama.cpp's `src/models/*.cpp` (what it loads and assumes) and `conversion/*.py` (how numbers are
changed on the way), and from transformers' `models/<family>/` for the names in the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import ModelShape, MoeShape
from llmtop.trainer.quantize.rope import Rope

_SILU = frozenset({"silu", "swish"})
_TANH_GELU = frozenset({"gelu_pytorch_tanh", "gelu_new"})
_GELU = _TANH_GELU | {"gelu"}
"""Gemma's own code takes the first whatever its configuration says."""
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_MOST_EXPERTS = 1024
"""`LLAMA_MAX_EXPERTS` of llama.cpp."""


class Experts(Struct, frozen=True, kw_only=True):
    """What a block's mixture is called in the files."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shares_one: bool = True
    """Whether what the chosen experts say is weighed to a sum of 1, as llama.cpp does for the family."""


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
    biased: tuple[str, ...] = QKV
    """Modules that may have a bias, beside those whose norms have one."""
    tied_only: bool = False
    """Its projection to logits is always the embedding."""
    untied_only: bool = False
    """It is always a matrix of its own."""
    splits_hidden: bool = False
    """Its heads together are as wide as the hidden size."""
    turns_part: bool = False
    """Positions may turn a part of each head only."""
    attention_out: str = "self_attn.o_proj"
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    """The last one leads back to the hidden size."""
    final_norm: str = "model.norm"
    experts: Experts | None = None
    """In place of the MLP of every block."""


_LLAMA = Family(
    arch="llama",
    interleaved=True,
    biased=(*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
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
    "phi3": Family(
        arch="phi3",
        biased=(),
        splits_hidden=True,
        turns_part=True,
        mlp=("mlp.gate_up_proj", "mlp.down_proj"),
    ),
    "phi": Family(
        arch="phi2",
        norms=("input_layernorm",),
        activations=_TANH_GELU,
        biased=(*QKV, "self_attn.dense", "mlp.fc1", "mlp.fc2", "lm_head"),
        untied_only=True,
        splits_hidden=True,
        turns_part=True,
        attention_out="self_attn.dense",
        mlp=("mlp.fc1", "mlp.fc2"),
        final_norm="model.final_layernorm",
    ),
    "mixtral": Family(
        arch="llama",
        interleaved=True,
        experts=Experts(module="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "qwen2_moe": Family(
        arch="qwen2moe", untied_only=True, splits_hidden=True, experts=Experts(shares_one=False)
    ),
    "qwen3_moe": Family(arch="qwen3moe", experts=Experts()),
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


def known_family(shape: ModelShape) -> Family | None:
    """Whose tensors are known one by one (`layout.expected`), whether GGUF can hold them or not."""
    mixed = shape.moe is not None and shape.moe.first_dense_layers > 0
    unnamed = shape.qk_norm != "none" and shape.norm == "layer"
    return None if mixed or unnamed else FAMILIES.get(shape.family)


def check_assumptions(config: dict[str, Any], shape: ModelShape, family: Family, where: str) -> None:
    """Raise UsageError where llama.cpp would compute something else from the file than the model does."""
    for what, why in _contradictions(config, shape, family):
        raise UsageError(
            f"{where}: {what} cannot be written to GGUF", why=why, fix="--to int8 or --to nf4 keeps it"
        )


def check_rotary(rope: Rope, family: Family, where: str) -> None:
    """The same of positions that turn a part of each head only."""
    if rope.rotary_part != 1 and not family.turns_part:
        raise UsageError(
            f"{where}: partial_rotary_factor {rope.rotary_part:g} cannot be written to GGUF",
            why=f"llama.cpp turns whole heads in {family.arch}",
            fix="--to int8 or --to nf4 keeps it",
        )


def _contradictions(config: dict[str, Any], shape: ModelShape, family: Family) -> Iterator[tuple[str, str]]:
    if shape.activation not in family.activations:
        yield f"the activation {shape.activation}", f"llama.cpp computes {min(family.activations)} for it"
    if family.tied_only and not shape.tied_embeddings:
        yield "a projection to logits of its own", f"in {family.arch} llama.cpp takes the embedding for it"
    if family.untied_only and shape.tied_embeddings:
        yield "a head tied to the embedding", f"in {family.arch} llama.cpp wants one of its own"
    if shape.qk_norm != "none" and shape.norm == "layer":
        yield "norms of queries and keys", f"llama.cpp has none in {family.arch}"
    if shape.moe is not None and family.experts is not None:
        yield from _mixture(config, shape.moe, family.experts, family.arch)
    if family.splits_hidden and shape.num_heads * shape.head_dim != shape.hidden_size:
        yield (
            f"{shape.num_heads} heads of {shape.head_dim}",
            f"llama.cpp expects heads of {family.arch} to share the hidden size, {shape.hidden_size}",
        )
    if shape.family in _PATTERN:
        yield from _gemma(config, shape)


def _mixture(config: dict[str, Any], moe: MoeShape, experts: Experts, arch: str) -> Iterator[tuple[str, str]]:
    if moe.first_dense_layers:
        yield "a model with layers that have no experts", f"in {arch} llama.cpp wants them in every one"
    if moe.num_experts > _MOST_EXPERTS:
        yield f"a mixture of {moe.num_experts} experts", f"llama.cpp reads {_MOST_EXPERTS} at most"
    if config.get("model_type") == "mixtral":
        return  # whose code knows no other way
    if bool(config.get("norm_topk_prob", False)) is not experts.shares_one:
        does = "brings" if experts.shares_one else "does not bring"
        yield (
            f"norm_topk_prob = {str(not experts.shares_one).lower()}",
            f"in {arch} llama.cpp {does} the weights of the chosen experts to a sum of 1",
        )


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
    if shape.sliding_window and shape.family not in _PATTERN:
        return (
            f"llama.cpp reads {shape.family} without its window of {shape.sliding_window:,} tokens: longer"
            " texts are answered differently",
        )
    return ()
