"""Parameters of a model shape by arithmetic: every weight tensor, by role and size.

Layouts follow the modelling code of transformers 5.x (`models/<family>/modeling_<family>.py`);
the tests compare them with the real modules on the meta device.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from math import prod

from msgspec import Struct

from llmtop.presets.spec import MlaShape, ModelShape, MoeShape, Traced


class Role(StrEnum):
    """What a tensor does; quantization, LoRA and weight decay choose by it."""

    EMBEDDING = "embedding"
    POSITION = "position"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    ROUTER = "router"
    NORM = "norm"
    BIAS = "bias"
    HEAD = "head"


class TensorGroup(Struct, frozen=True, kw_only=True):
    """`count` equal tensors."""

    name: str
    """Module name within a block, or of the model's own."""
    shape: tuple[int, ...]
    """As stored: (out, in) for a matrix."""
    count: int
    role: Role
    per_layer: bool
    """Inside a block (`count` is then over all blocks) or outside."""

    @property
    def numel(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    @property
    def total(self) -> int:
        """Elements of all `count` tensors."""
        return self.numel * self.count


class _Builder:
    """Collects the tensors of one model."""

    def __init__(self) -> None:
        self.groups: list[TensorGroup] = []

    def add(self, name: str, shape: tuple[int, ...], count: int, role: Role, per_layer: bool = True) -> None:
        if count > 0 and prod(shape) > 0:
            self.groups.append(
                TensorGroup(name=name, shape=shape, count=count, role=role, per_layer=per_layer)
            )

    def linear(
        self,
        name: str,
        rows: int,
        columns: int,
        count: int,
        role: Role,
        *,
        bias: bool,
        per_layer: bool = True,
    ) -> None:
        self.add(name, (rows, columns), count, role, per_layer)
        if bias:
            self.add(f"{name}.bias", (rows,), count, Role.BIAS, per_layer)

    def norm(self, name: str, width: int, count: int, model: ModelShape, per_layer: bool = True) -> None:
        if not model.norm_weight:
            return
        self.add(name, (width,), count, Role.NORM, per_layer)
        if model.norm == "layer" and model.norm_bias:
            self.add(f"{name}.bias", (width,), count, Role.NORM, per_layer)


def _attention(build: _Builder, model: ModelShape) -> None:
    layers, hidden = model.num_layers, model.hidden_size
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if model.fused_qkv:
        build.linear("qkv_proj", query + 2 * kv, hidden, layers, Role.ATTENTION, bias=model.qkv_bias)
    else:
        build.linear("q_proj", query, hidden, layers, Role.ATTENTION, bias=model.qkv_bias)
        build.linear("k_proj", kv, hidden, layers, Role.ATTENTION, bias=model.qkv_bias)
        build.linear("v_proj", kv, hidden, layers, Role.ATTENTION, bias=model.qkv_bias)
    build.linear("o_proj", hidden, query, layers, Role.ATTENTION, bias=model.output_bias)
    if model.qk_norm == "head":
        build.norm("q_norm", model.head_dim, layers, model)
        build.norm("k_norm", model.head_dim, layers, model)
    elif model.qk_norm == "full":
        build.norm("q_norm", query, layers, model)
        build.norm("k_norm", kv, layers, model)
    elif model.qk_norm == "per_head":
        # Command R and StableLM: no bias here, whatever the block's norms have.
        build.add("q_norm", (model.num_heads, model.head_dim), layers, Role.NORM)
        build.add("k_norm", (model.num_kv_heads, model.head_dim), layers, Role.NORM)
    if model.attention_sinks:
        build.add("sinks", (model.num_heads,), layers, Role.BIAS)


def _latent_attention(build: _Builder, model: ModelShape, mla: MlaShape) -> None:
    layers, hidden, heads = model.num_layers, model.hidden_size, model.num_heads
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        build.linear("q_proj", query, hidden, layers, Role.ATTENTION, bias=False)
    else:
        build.linear("q_a_proj", mla.q_lora_rank, hidden, layers, Role.ATTENTION, bias=model.qkv_bias)
        build.norm("q_a_layernorm", mla.q_lora_rank, layers, model)
        build.linear("q_b_proj", query, mla.q_lora_rank, layers, Role.ATTENTION, bias=False)
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    build.linear("kv_a_proj_with_mqa", latent, hidden, layers, Role.ATTENTION, bias=model.qkv_bias)
    build.norm("kv_a_layernorm", mla.kv_lora_rank, layers, model)
    wide = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    build.linear("kv_b_proj", wide, mla.kv_lora_rank, layers, Role.ATTENTION, bias=False)
    build.linear("o_proj", hidden, heads * mla.v_head_dim, layers, Role.ATTENTION, bias=model.output_bias)


def _mlp(build: _Builder, model: ModelShape, width: int, count: int, prefix: str = "") -> None:
    hidden, bias = model.hidden_size, model.mlp_bias
    if model.gated_mlp and model.fused_gate_up:
        build.linear(f"{prefix}gate_up_proj", 2 * width, hidden, count, Role.MLP, bias=bias)
    elif model.gated_mlp:
        build.linear(f"{prefix}gate_proj", width, hidden, count, Role.MLP, bias=bias)
        build.linear(f"{prefix}up_proj", width, hidden, count, Role.MLP, bias=bias)
    else:
        build.linear(f"{prefix}up_proj", width, hidden, count, Role.MLP, bias=bias)
    build.linear(f"{prefix}down_proj", hidden, width, count, Role.MLP, bias=bias)


def _experts(build: _Builder, model: ModelShape, moe: MoeShape) -> None:
    layers, hidden = model.num_layers - moe.first_dense_layers, model.hidden_size
    width, experts = moe.expert_intermediate_size, moe.num_experts
    build.linear("router", experts, hidden, layers, Role.ROUTER, bias=moe.router_bias)
    # transformers 5 stores the experts of a layer as two 3-D tensors.
    build.add("experts.gate_up_proj", (experts, 2 * width, hidden), layers, Role.EXPERT)
    build.add("experts.down_proj", (experts, hidden, width), layers, Role.EXPERT)
    if moe.expert_bias:
        build.add("experts.gate_up_proj_bias", (experts, 2 * width), layers, Role.BIAS)
        build.add("experts.down_proj_bias", (experts, hidden), layers, Role.BIAS)
    if moe.shared_intermediate_size:
        _mlp(build, model, moe.shared_intermediate_size, layers, "shared_expert.")
    if moe.shared_gate:
        build.add("shared_expert_gate", (1, hidden), layers, Role.ROUTER)


def _traced(traced: Traced) -> tuple[TensorGroup, ...]:
    return tuple(
        TensorGroup(
            name=tensor.name,
            shape=tensor.shape,
            count=tensor.count,
            role=Role(tensor.role),
            per_layer=tensor.per_layer,
        )
        for tensor in traced.tensors
    )


@lru_cache(maxsize=256)
def tensors(model: ModelShape) -> tuple[TensorGroup, ...]:
    """Every trainable tensor of the model, tied ones once."""
    if model.traced is not None:
        return _traced(model.traced)
    build = _Builder()
    hidden, layers, vocab = model.hidden_size, model.num_layers, model.vocab_size
    width = model.embedding_dim or hidden
    build.add("embed_tokens", (vocab, width), 1, Role.EMBEDDING, per_layer=False)
    if model.embedding_dim is not None and model.embedding_dim != hidden:
        build.add("project_in", (hidden, width), 1, Role.EMBEDDING, per_layer=False)
        build.add("project_out", (width, hidden), 1, Role.HEAD, per_layer=False)
    if model.learned_positions:
        build.add("embed_positions", (model.learned_positions, hidden), 1, Role.POSITION, per_layer=False)
    if model.embedding_norm:
        build.norm("embed_norm", hidden, 1, model, per_layer=False)
    if model.norms_per_layer:
        build.norm("layernorm", hidden, layers * model.norms_per_layer, model)
    if model.mla is not None:
        _latent_attention(build, model, model.mla)
    else:
        _attention(build, model)
    if model.moe is None:
        _mlp(build, model, model.intermediate_size, layers)
    else:
        _mlp(build, model, model.intermediate_size, model.moe.first_dense_layers)
        _experts(build, model, model.moe)
    if model.final_norm:
        build.norm("norm", hidden, 1, model, per_layer=False)
    if not model.tied_embeddings:
        build.linear("lm_head", vocab, width, 1, Role.HEAD, bias=False, per_layer=False)
    if model.head_bias:
        build.add("lm_head.bias", (vocab,), 1, Role.BIAS, per_layer=False)
    return tuple(build.groups)


@lru_cache(maxsize=256)
def param_count(model: ModelShape) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    return sum(group.total for group in tensors(model))
