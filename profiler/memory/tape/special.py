"""The parts of a block that not every family has: experts, and attention from a latent."""

from __future__ import annotations

from typing import Protocol

from llmtop.presets.liger import FUSED_EXPERTS
from llmtop.presets.spec import MlaShape, ModelShape, MoeShape, RunSpec
from llmtop.profiler.memory.latent import latent_output_copied
from llmtop.profiler.memory.mlp import ROUTED_IN_FP32
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.tape.attention import Heads, Kernel
from llmtop.profiler.memory.tape.blocks import GatedMlp
from llmtop.profiler.memory.tape.experts import (
    Experts,
    ExpertSizes,
    ExpertsMlp,
    FusedExperts,
    GroupedExperts,
)
from llmtop.profiler.memory.tape.latent import LatentAttention, LatentSizes
from llmtop.profiler.memory.tape.layers import Frame, Linear, Norm
from llmtop.profiler.memory.tape.router import Router, RoutingForm

_WEIGHED_IN_FP32 = ROUTED_IN_FP32 | {"mixtral"}
"""Families whose chosen scores stay in fp32."""


class Parts(Protocol):
    """What makes the layers of a model: `build.Builder`."""

    spec: RunSpec
    sizes: Sizes
    shape: ModelShape
    frame: Frame
    full: bool

    def kernel(self, heads: Heads) -> Kernel: ...
    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear: ...
    def norm(self, columns: int, *, rows: int = 1) -> Norm: ...
    def slot(self, name: str) -> int: ...
    def gated_mlp(self, inner: int, prefix: str = "") -> GatedMlp: ...


def experts_mlp(parts: Parts, moe: MoeShape) -> ExpertsMlp:
    """Router, experts and the shared expert of one block."""
    frame, sizes, shape = parts.frame, parts.sizes, parts.shape
    shared = moe.shared_intermediate_size
    return ExpertsMlp(
        frame,
        router=_router(parts, moe),
        experts=_experts(parts, moe),
        shared=parts.gated_mlp(shared, "shared_expert.") if shared else None,
        gated=moe.shared_gate,
        hidden_bytes=sizes.tokens * shape.hidden_size * sizes.dtype_bytes,
    )


def _router(parts: Parts, moe: MoeShape) -> Router:
    family = parts.shape.family
    wide = family in ROUTED_IN_FP32
    return Router(
        parts.frame,
        experts=moe.num_experts,
        chosen=moe.experts_per_token,
        columns=parts.shape.hidden_size,
        trained=parts.full,
        form=RoutingForm(
            wide=wide,
            sigmoid=family == "deepseek_v3",
            wide_weights=family in _WEIGHED_IN_FP32,
            fused_cast=parts.spec.options.precision == "fp16" and family not in _WEIGHED_IN_FP32,
            groups=int(parts.spec.hf_config.get("n_group") or 1),
        ),
        slot=parts.slot("router"),
    )


def _experts(parts: Parts, moe: MoeShape) -> Experts:
    shape, width = parts.shape, parts.sizes.dtype_bytes
    tokens, hidden, inner = parts.sizes.tokens, shape.hidden_size, moe.expert_intermediate_size
    chosen = tokens * moe.experts_per_token
    weighted = 4 if shape.family in _WEIGHED_IN_FP32 else width
    sizes = ExpertSizes(
        places=8 * chosen,
        weights=weighted * chosen,
        rows=chosen * hidden * width,
        weighted=chosen * hidden * weighted,
        inner=chosen * inner * width,
        hidden=tokens * hidden * width,
        summed=tokens * hidden * weighted,
        joined_elements=moe.num_experts * 2 * inner * hidden,
        down_elements=moe.num_experts * inner * hidden,
    )
    slots = parts.slot("experts.gate_up_proj"), parts.slot("experts.down_proj")
    if "glu" in parts.sizes.liger and shape.family in FUSED_EXPERTS:
        return FusedExperts(parts.frame, sizes, trained=parts.full, slots=slots)
    return GroupedExperts(parts.frame, sizes, trained=parts.full, slots=slots)


def latent_heads(spec: RunSpec, sizes: Sizes, mla: MlaShape) -> Heads:
    """Every head has a key and a value of its own, of different widths."""
    tokens, width, heads = sizes.tokens, sizes.dtype_bytes, spec.model.num_heads
    key = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    scores = tokens * heads * sizes.seq_len
    value = tokens * heads * mla.v_head_dim * width
    padded = spec.options.attention not in ("eager", "sdpa")
    query = tokens * heads * key * width
    return Heads(
        query=query,
        kv=query,
        value=query if padded else value,
        output=query if padded else value,
        statistics=4 * tokens * heads,
        wide_query=4 * tokens * heads * key,
        scores=scores * width,
        wide_scores=scores * 4,
        grouped=False,
        several=spec.options.micro_batch > 1,
        in_order=True,
    )


def latent_attention(parts: Parts, mla: MlaShape) -> LatentAttention:
    """The attention of one block, whose positions are turned as its family does it."""
    spec, sizes, shape = parts.spec, parts.sizes, parts.shape
    tokens, width, heads, hidden = sizes.tokens, sizes.dtype_bytes, shape.num_heads, shape.hidden_size
    key = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    turned = heads * mla.qk_rope_head_dim
    of_heads = latent_heads(spec, sizes, mla)
    queries: tuple[Linear, Norm, Linear] | Linear
    if mla.q_lora_rank is None:
        queries = parts.linear("q_proj", heads * key, hidden)
    else:
        down = parts.linear("q_a_proj", mla.q_lora_rank, hidden, bias=shape.qkv_bias)
        up = parts.linear("q_b_proj", heads * key, mla.q_lora_rank)
        queries = down, parts.norm(mla.q_lora_rank), up
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    return LatentAttention(
        parts.frame,
        of_heads,
        LatentSizes(
            query=of_heads.query,
            latent=tokens * latent * width,
            expanded=tokens * expanded * width,
            plain=tokens * heads * mla.qk_nope_head_dim * width,
            value=tokens * heads * mla.v_head_dim * width,
            turned_query=tokens * turned * width,
            turned_key=tokens * mla.qk_rope_head_dim * width,
            wide_query=4 * tokens * turned,
            wide_key=4 * tokens * mla.qk_rope_head_dim,
            table=4 * sizes.seq_len * mla.qk_rope_head_dim,
        ),
        kernel=parts.kernel(of_heads),
        queries=queries,
        compress=parts.linear("kv_a_proj_with_mqa", latent, hidden, bias=shape.qkv_bias),
        norm=parts.norm(mla.kv_lora_rank),
        expand=parts.linear("kv_b_proj", expanded, mla.kv_lora_rank),
        output=parts.linear("o_proj", hidden, heads * mla.v_head_dim, bias=shape.output_bias),
        interleaved=shape.family == "deepseek_v3",
        copied=latent_output_copied(spec),
        padded=spec.options.attention not in ("eager", "sdpa"),
    )
