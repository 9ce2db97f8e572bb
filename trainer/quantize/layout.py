"""Every tensor of a model of a family, as its files name it, and where the model's own code keeps it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import ModelShape, MoeShape
from llmtop.trainer.quantize.families import QKV, Experts, Family
from llmtop.trainer.quantize.source import SourceTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARED_GATE = "shared_expert_gate"
_EXPERT = re.compile(r"(?P<block>.*)\.experts\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
_STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<matrix>gate_up_proj|down_proj)")


class Place(Struct, frozen=True, kw_only=True):
    """Where transformers' code keeps a tensor: experts of a block are one tensor there."""

    parameter: str
    expert: int | None = None
    """Its number, of a tensor whose first dimension is experts."""
    half: int | None = None
    """0 for the upper half of that expert's rows, 1 for the lower; None: all of them."""


def expected(shape: ModelShape, family: Family) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model, as its files name it, with its shape."""
    hidden = shape.hidden_size
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        for module, size in _block(shape, family):
            found[f"model.layers.{layer}.{module}"] = size
    found |= _norm(shape, family.final_norm)
    if not shape.tied_embeddings:
        found[HEAD] = (shape.vocab_size, hidden)
    if shape.head_bias:
        found["lm_head.bias"] = (shape.vocab_size,)
    return found


def together(key: str) -> str:
    """The name of what one file of llama.cpp keeps as one tensor: a matrix of all experts of a block."""
    found = _EXPERT.fullmatch(key)
    return f"{found['block']}.experts.{found['matrix']}.weight" if found else key


def place_of(key: str, family: Family) -> Place:
    """Of a tensor of the files, in the model as transformers 5 makes it."""
    experts = family.experts
    if experts is None:
        return Place(parameter=key)
    name = key.replace(f".{experts.module}.", ".mlp.")
    found = _EXPERT.fullmatch(name)
    if found is None:
        return Place(parameter=name)
    block, number, matrix = f"{found['block']}.experts", int(found["number"]), found["matrix"]
    if matrix == experts.down:
        return Place(parameter=f"{block}.down_proj", expert=number)
    return Place(parameter=f"{block}.gate_up_proj", expert=number, half=int(matrix == experts.up))


def apart(tensors: dict[str, SourceTensor], family: Family) -> dict[str, SourceTensor]:
    """The same with a tensor for each expert, where a block's are one, as transformers' code keeps them."""
    names = family.experts
    if names is None or not any(_STACKED.fullmatch(key) for key in tensors):
        return tensors
    found: dict[str, SourceTensor] = {}
    for key, tensor in tensors.items():
        name = key.replace(".mlp.", f".{names.module}.")
        stacked = _STACKED.fullmatch(name)
        if stacked is None or len(tensor.shape) != 3:
            found[name] = replace(tensor, key=name)
            continue
        matrices = (names.down,) if stacked["matrix"] == "down_proj" else (names.gate, names.up)
        for at, (number, matrix) in enumerate(product(range(tensor.shape[0]), matrices)):
            one = f"{stacked['experts']}.{number}.{matrix}.weight"
            found[one] = _piece(tensor, one, at, len(matrices))
    return found


def _piece(tensor: SourceTensor, key: str, at: int, of: int) -> SourceTensor:
    """One of the matrices that lie one after the other in a tensor, `of` of them for each expert."""
    size = (tensor.shape[1] // of, tensor.shape[2])
    piece = replace(tensor, key=key, shape=size)
    return replace(piece, start_byte=tensor.start_byte + at * piece.size_bytes)


def _block(shape: ModelShape, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden_size
    query = shape.num_heads * shape.head_dim
    yield from _attention(shape, query, shape.num_kv_heads * shape.head_dim)
    yield from _linear(family.attention_out, hidden, query, shape.output_bias)
    if family.experts is not None and shape.moe is not None:
        yield from _mixture(shape.moe, hidden, family.experts)
    else:
        yield from _mlp(shape, family)
    if shape.qk_norm == "head":
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
    for norm in family.norms:
        yield from _norm(shape, norm).items()


def _norm(shape: ModelShape, module: str) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if shape.norm == "layer" else ("weight",)
    return {f"{module}.{part}": (shape.hidden_size,) for part in parts}


def _linear(module: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{module}.weight", (rows, columns)
    if bias:
        yield f"{module}.bias", (rows,)


def _attention(shape: ModelShape, query: int, kv: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, bias = shape.hidden_size, shape.qkv_bias
    if shape.fused_qkv:
        yield from _linear("self_attn.qkv_proj", query + 2 * kv, hidden, bias)
        return
    for module, rows in zip(QKV, (query, kv, kv), strict=True):
        yield from _linear(module, rows, hidden, bias)


def _mlp(shape: ModelShape, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = shape.hidden_size, shape.intermediate_size
    *wide, back = family.mlp
    rows = 2 * width if shape.fused_gate_up else width
    for module in wide:
        yield from _linear(module, rows, hidden, shape.mlp_bias)
    yield from _linear(back, hidden, width, shape.mlp_bias)


def _mixture(moe: MoeShape, hidden: int, experts: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, shared = moe.expert_intermediate_size, moe.shared_intermediate_size
    yield f"{experts.module}.gate.weight", (moe.num_experts, hidden)
    for matrix, size in (
        (experts.gate, (width, hidden)),
        (experts.up, (width, hidden)),
        (experts.down, (hidden, width)),
    ):
        for number in range(moe.num_experts):
            yield f"{experts.module}.experts.{number}.{matrix}.weight", size
    if shared:
        yield f"{experts.module}.shared_expert.gate_proj.weight", (shared, hidden)
        yield f"{experts.module}.shared_expert.up_proj.weight", (shared, hidden)
        yield f"{experts.module}.shared_expert.down_proj.weight", (hidden, shared)
    if moe.shared_gate:
        yield f"{experts.module}.{SHARED_GATE}.weight", (1, hidden)
