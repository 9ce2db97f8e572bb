"""The attention of a block of a model, but for that from a latent: which form its family's code has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtop.profiler.memory.blocks import (
    POST_NORM,
    ROTARY_BY_CONCATENATION,
    SOFTMAX_AS_IT_IS,
    plain_attention,
)
from llmtop.profiler.memory.tape.attention import (
    Attention,
    AttentionForm,
    EagerKernel,
    FusedKernel,
    Heads,
    Kernel,
    MathKernel,
)
from llmtop.profiler.memory.tape.layers import Norm
from llmtop.profiler.memory.tape.rotary import PartialRotary

if TYPE_CHECKING:
    from llmtop.profiler.memory.tape.blocks import Attending
    from llmtop.profiler.memory.tape.joined import JoinedForm
    from llmtop.profiler.memory.tape.special import Parts

_PARTIAL = frozenset({"glm", "glm4"})
"""Families that turn a part of each head, with queries, keys and values projected apart."""


def attention(parts: Parts) -> Attending:
    """With projections of its own for queries, keys and values, or with one for all."""
    shape, sizes = parts.shape, parts.sizes
    query_columns, kv_columns = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    heads = _heads(parts, query_columns, kv_columns)
    hidden, bias = shape.hidden_size, shape.qkv_bias
    rotary = "fused" if "rope" in sizes.liger else "none" if shape.learned_positions else "plain"
    output = parts.linear("o_proj", hidden, query_columns, bias=shape.output_bias)
    if shape.family == "bloom":
        from llmtop.profiler.memory.tape.bloom import BloomAttention  # most models have none

        joined = parts.linear("qkv_proj", query_columns + 2 * kv_columns, hidden, bias=bias)
        return BloomAttention(parts.frame, heads, joined=joined, output=output)
    if shape.fused_qkv:
        from llmtop.profiler.memory.tape.joined import JoinedAttention  # most models have none

        return JoinedAttention(
            parts.frame,
            heads,
            kernel=parts.kernel(heads),
            joined=parts.linear("qkv_proj", query_columns + 2 * kv_columns, hidden, bias=bias),
            output=output,
            form=_joined_form(parts, rotary),
        )
    in_part = shape.family in _PARTIAL and rotary == "plain"
    query_norm, key_norm = _norms(parts)
    return Attention(
        parts.frame,
        heads,
        kernel=parts.kernel(heads),
        query=parts.linear("q_proj", query_columns, hidden, bias=bias),
        key=parts.linear("k_proj", kv_columns, hidden, bias=bias),
        value=parts.linear("v_proj", kv_columns, hidden, bias=bias),
        output=output,
        query_norm=query_norm,
        key_norm=key_norm,
        form=AttentionForm(
            rotary=rotary,
            scales_query=shape.family == "opt",
            norms_last=shape.family == "gemma3_text",
            rotary_in_fp32=shape.family in POST_NORM,
            views_last=shape.family in POST_NORM,
            copied=in_part and _output_copied(parts, rotary),
        ),
        partial=_partial(parts, heads) if in_part else None,
    )


def kernel(parts: Parts, heads: Heads) -> Kernel:
    """What multiplies queries, keys and values."""
    options, shape = parts.spec.options, parts.shape
    if not plain_attention(parts.spec):
        return FusedKernel(parts.frame, heads, one_buffer=options.attention == "sdpa")
    if options.attention == "sdpa":
        return MathKernel(parts.frame, heads)
    return EagerKernel(
        parts.frame,
        heads,
        capped=bool(shape.attention_softcap),
        half_to_float=options.precision == "fp16",
        upcast=shape.family not in SOFTMAX_AS_IT_IS,
        dropout=bool(parts.shape.score_dropout),
    )


def _norms(parts: Parts) -> tuple[Norm | None, Norm | None]:
    """Of queries and keys: of each head, or of all heads as one vector (OLMo-2)."""
    shape = parts.shape
    if shape.qk_norm == "none":
        return None, None
    counts = shape.num_heads, shape.num_kv_heads
    if shape.qk_norm == "full":
        query, key = (parts.norm(count * shape.head_dim) for count in counts)
    else:
        query, key = (parts.norm(shape.head_dim, rows=count) for count in counts)
    return query, key


def _joined_form(parts: Parts, rotary: str) -> JoinedForm:
    from llmtop.profiler.memory.tape.joined import JoinedForm

    family, config = parts.shape.family, parts.spec.hf_config
    part = config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    return JoinedForm(
        rotary=rotary,
        part=float(part),
        by_heads=family == "gpt_neox",
        sliced=family == "phi3",
        copied=_output_copied(parts, rotary),
    )


def _output_copied(parts: Parts, rotary: str) -> bool:
    """Of joined queries; CUDA's kernel for fp32 returns rows, as eager attention does."""
    return rotary == "plain" and parts.spec.options.precision != "fp32" and not plain_attention(parts.spec)


def _partial(parts: Parts, heads: Heads) -> PartialRotary:
    part = float(parts.spec.hf_config.get("partial_rotary_factor", 0.5))
    table = round(part * parts.shape.head_dim) * parts.sizes.seq_len * parts.sizes.dtype_bytes
    return PartialRotary(parts.frame, heads.query, heads.kv, part=part, table=table)


def _heads(parts: Parts, query_columns: int, kv_columns: int) -> Heads:
    shape, sizes = parts.shape, parts.sizes
    tokens, width = sizes.tokens, sizes.dtype_bytes
    scores = tokens * shape.num_heads * sizes.seq_len
    return Heads(
        query=tokens * query_columns * width,
        kv=tokens * kv_columns * width,
        value=tokens * kv_columns * width,
        output=tokens * query_columns * width,
        statistics=4 * tokens * shape.num_heads,
        wide_query=4 * tokens * query_columns,
        scores=scores * width,
        wide_scores=scores * 4,
        grouped=shape.num_kv_heads != shape.num_heads,
        several=parts.spec.options.micro_batch > 1,
        in_order=shape.family in ROTARY_BY_CONCATENATION and "rope" not in sizes.liger,
    )
