"""Bytes that one transformer block keeps for its backward pass, and what that pass needs on top.

Counted tensor by tensor from the modelling code of transformers 5.x with torch's autograd rules (what
each operation saves), per token of the micro-batch, and checked against H200 runs: one Llama-3.2-1B
block keeps 108,680 bytes a token by this arithmetic.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.liger import FUSED_EXPERTS
from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.memory.sizes import Sizes

ROTARY_BY_CONCATENATION = frozenset({"phi3", "phi", "gpt_neox", "glm", "glm4", "stablelm", "gpt_oss"})
"""Families whose rotary code joins parts, so queries lose the layout that lets attention skip a copy."""
FP32_NORMALIZED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3"})
"""RMSNorms that multiply by the weight in fp32 and so keep the normalized value in fp32."""


class BlockBytes(Struct, frozen=True, kw_only=True):
    """Bytes per token of the micro-batch."""

    saved: int
    """Kept from forward to backward without checkpointing."""
    input_saved: int
    """The part of `saved` that is the block's own input (a checkpoint already holds it)."""
    backward_extra: int
    """Largest transient of the block's backward on top of `saved` (the incoming gradient not included)."""
    backward_freed: int
    """What of `saved` is already gone when that transient is alive."""
    peak_in_attention: bool
    """That transient belongs to the attention (score matrices), after the MLP's backward."""
    gradient: int
    """The gradient of the block's output."""


def final_norm_saved(spec: RunSpec, sizes: Sizes) -> int:
    """Bytes per token kept by the norm before the head, its output included where the head is trained."""
    model, width = spec.model, sizes.dtype_bytes
    if not model.final_norm:
        return 0
    fused_loss = "fused_linear_cross_entropy" in sizes.liger
    output = model.hidden_size * width if sizes.head_trained and not fused_loss else 0
    return _norm(model, sizes, trained=sizes.head_trained) + output


def _norm(model: ModelShape, sizes: Sizes, *, trained: bool, width: int | None = None, rows: int = 1) -> int:
    """What one norm keeps per token, its output not included.

    RMSNorm in plain code upcasts: the fp32 input is kept, and the normalized value where the weight is
    trained, in the model's precision or in fp32. Liger and LayerNorm keep their input and statistics.
    `rows` is how many vectors a token has (one for each head in a norm over heads).
    """
    columns = model.hidden_size if width is None else width
    if _liger_norm(model, sizes):
        return columns * sizes.dtype_bytes + 4 * rows
    if model.family.startswith("cohere"):
        return 12 * columns + 4
    if model.norm == "layer":
        return columns * sizes.dtype_bytes + 8 * rows
    normalized = 4 if model.family in FP32_NORMALIZED else sizes.dtype_bytes
    return columns * (4 + (normalized if trained else 0)) + 4 * rows


def _liger_norm(model: ModelShape, sizes: Sizes) -> bool:
    return ("rms_norm" if model.norm == "rms" else "layer_norm") in sizes.liger


def _attention_saved(spec: RunSpec, sizes: Sizes) -> int:
    """Queries, keys, values, output and statistics of the attention, with the square terms of eager."""
    model, width = spec.model, sizes.dtype_bytes
    heads, groups = model.num_heads, model.num_kv_heads
    if model.mla is not None:
        return _latent_attention_saved(spec, sizes)
    query = heads * model.head_dim
    kv = groups * model.head_dim
    norms = _query_key_norms(spec, sizes, query, kv)
    if plain_attention(spec):
        # Keys and values are repeated to every head.
        return norms + 4 * query * width + heads * sizes.seq_len * eager_square(model, width)
    if model.family == "falcon" and groups != heads and spec.options.attention == "sdpa":
        # One key for many heads: torch falls back to plain mathematics in fp32.
        return norms + query * width + 3 * 4 * query + 4 * heads * sizes.seq_len
    values = kv
    if model.fused_qkv and model.family != "gpt2":
        values = query + 2 * kv  # the values are a view that keeps the whole projection alive
    # Liger rotates in place of the layout that attention reads.
    copied = query if model.family in ROTARY_BY_CONCATENATION and "rope" not in sizes.liger else 0
    if model.family == "gpt2":
        copied = 0  # without rotary, queries, keys and values are views of one projection: counted once
    return norms + (2 * query + kv + values + copied) * width + 4 * heads


def plain_attention(spec: RunSpec) -> bool:
    """Whether attention makes whole score matrices: eager, and SDPA where torch has no kernel for the case.

    On CUDA, grouped heads in fp32 have none (flash takes 16 bits only, the memory-efficient kernel no
    groups): torch falls back to plain mathematics. Measured on H200 with torch 2.11.
    """
    options, model = spec.options, spec.model
    if options.attention == "eager":
        return True
    grouped = model.num_kv_heads != model.num_heads
    return options.attention == "sdpa" and options.precision == "fp32" and grouped and not spec.on_cpu


def eager_square(model: ModelShape, width: int) -> int:
    """Bytes that eager attention keeps per score: softmax in fp32, and again in the model's precision."""
    capped = width if model.attention_softcap else 0
    if model.family == "gpt2":
        return width + (1 + width if model.dropout else 0)
    if model.family == "falcon":
        return width
    return capped + (4 if width == 4 else 4 + width)


def _softmax_backward(spec: RunSpec, sizes: Sizes) -> tuple[int, int]:
    """Transient and already freed bytes per token while the softmax of plain attention is differentiated.

    Beside the softmax that is still kept there are its gradient, the product of both, and the result: torch
    2.11, `aten/src/ATen/native/cuda/SoftMax.cu:softmax_backward_cuda_out`. The result has 16 bits for fp16
    alone, whose conversion is part of the kernel (`SoftMax.cpp:softmax`). The product with the values is
    done: its copies of weights and values are gone, and the gradient of the values is there.
    """
    model, width = spec.model, sizes.dtype_bytes
    own_width = model.family in ("gpt2", "falcon") and spec.options.attention == "eager"
    softmax = width if own_width else 4
    result = width if own_width or spec.options.precision == "fp16" else 4
    copies = eager_square(model, width) - softmax if spec.options.attention == "eager" else 0
    if model.attention_softcap:
        copies -= width  # of the capped scores, which come later
    square = model.num_heads * sizes.seq_len
    values = 2 * model.num_heads * model.head_dim * width
    return square * (2 * softmax + result) + values, square * copies + values


def _query_key_norms(spec: RunSpec, sizes: Sizes, query: int, kv: int) -> int:
    model = spec.model
    if model.qk_norm == "none":
        return 0
    trained = sizes.lora_rank == 0
    by_head = model.qk_norm != "full"
    return _norm(model, sizes, trained=trained, width=query, rows=model.num_heads if by_head else 1) + _norm(
        model, sizes, trained=trained, width=kv, rows=model.num_kv_heads if by_head else 1
    )


def _latent_attention_saved(spec: RunSpec, sizes: Sizes) -> int:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): compressed and expanded heads."""
    model, width = spec.model, sizes.dtype_bytes
    mla = model.mla
    assert mla is not None
    heads = model.num_heads
    head_width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    compressed = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
    norms = _norm(model, sizes, trained=True, width=mla.kv_lora_rank)
    expanded = heads * (2 * head_width + 2 * mla.v_head_dim)
    eager = spec.options.attention == "eager"
    square = heads * (sizes.seq_len * eager_square(model, width) if eager else 4)
    return norms + (compressed + mla.kv_lora_rank + expanded) * width + square


def mlp_copies(model: ModelShape, sizes: Sizes) -> int:
    """How many tensors of the MLP's width are kept."""
    if model.gated_mlp:
        # gate, up, activated gate, product; Liger recomputes the activation.
        return 3 if "glu" in sizes.liger else 4
    if model.activation == "relu":
        return 1
    if model.activation in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python"):
        # Written as Python arithmetic: input, its half, tanh, 1 + tanh, and the product.
        return 5
    return 2


def _mlp_saved(spec: RunSpec, sizes: Sizes) -> int:
    model, width = spec.model, sizes.dtype_bytes
    copies = mlp_copies(model, sizes)
    if not sizes.mlp_adapted:
        copies -= 1  # the product is kept only for the gradient of the last matrix
    dense = copies * model.intermediate_size * width
    if model.moe is None:
        return dense
    moe = model.moe
    # Each token's experts keep gathered input, gate, up, activation, product and weighted output.
    routed = moe.experts_per_token * (4 * moe.expert_intermediate_size + 2 * model.hidden_size) * width
    if _fused_experts(model, sizes):
        routed = moe.experts_per_token * 2 * moe.expert_intermediate_size * width
    shared = copies * moe.shared_intermediate_size * width
    router = 8 * moe.num_experts + 36 * moe.experts_per_token
    blend = moe.first_dense_layers / model.num_layers
    return round(dense * blend + (routed + shared + router) * (1 - blend))


def _fused_experts(model: ModelShape, sizes: Sizes) -> bool:
    """Liger's experts keep gate and up alone: liger-kernel 0.8.5, `ops/fused_moe.py`."""
    return model.moe is not None and "glu" in sizes.liger and model.family in FUSED_EXPERTS


def _mlp_width(model: ModelShape) -> int:
    """The widest intermediate that exists at once for a token."""
    if model.moe is None:
        return model.intermediate_size
    moe = model.moe
    return max(
        model.intermediate_size if moe.first_dense_layers else 0,
        moe.experts_per_token * moe.expert_intermediate_size + moe.shared_intermediate_size,
    )


def _mlp_backward(spec: RunSpec, sizes: Sizes) -> tuple[int, int]:
    """Transient and already freed bytes per token at the peak of the MLP's backward.

    Plain code: gradients of product, activation and up are alive while the product is gone. Liger writes
    its gradients over gate and up, so only the product's gradient is new; an adapter adds one more.
    """
    model, width = spec.model, sizes.dtype_bytes
    inner = _mlp_width(model) * width
    if sizes.lora_rank:
        return 2 * inner, 0
    if not model.gated_mlp:
        return inner, 0
    if _fused_experts(model, sizes):
        return 3 * inner, 0
    if "glu" in sizes.liger:
        return inner, 0
    return 3 * inner, inner


def block_bytes(spec: RunSpec, sizes: Sizes) -> BlockBytes:
    """Everything about one block, per token."""
    model, width = spec.model, sizes.dtype_bytes
    hidden = model.hidden_size * width
    trained = sizes.lora_rank == 0
    norm = _norm(model, sizes, trained=trained)
    norms = max(1, model.norms_per_layer) * norm
    # Norms after attention and MLP (Gemma-2) feed an addition, which keeps nothing of their output.
    outputs = (1 if sizes.attention_adapted else 0) + (1 if sizes.mlp_adapted else 0)
    if model.norms_per_layer == 1:
        outputs = min(outputs, 1)  # attention and MLP read the same norm's output
    keeps_input = _liger_norm(model, sizes) or model.norm == "layer" or width == 4
    input_saved = hidden if keeps_input else 0
    if model.parallel_block and keeps_input and model.norms_per_layer == 2:
        norms -= hidden  # both norms read, and keep, the same input
    adapters = sizes.lora_modules * sizes.lora_rank * width
    attention = _attention_saved(spec, sizes)
    masks = _dropout_masks(model)
    mlp = _mlp_saved(spec, sizes)
    saved = norms + outputs * hidden + attention + mlp + adapters + masks
    extra, freed = _mlp_backward(spec, sizes)
    in_attention = False
    if plain_attention(spec):
        in_softmax, given_back = _softmax_backward(spec, sizes)
        # By then the MLP half of the block has given its memory back.
        given_back += mlp + norm + hidden
        if in_softmax - given_back > extra - freed:
            extra, freed, in_attention = in_softmax, given_back, True
    return BlockBytes(
        saved=saved,
        input_saved=input_saved,
        backward_extra=extra,
        backward_freed=freed,
        peak_in_attention=in_attention,
        gradient=hidden,
    )


def _dropout_masks(model: ModelShape) -> int:
    """One byte an element for each dropout on the hidden state, after attention and after the MLP."""
    return 2 * model.hidden_size if model.dropout else 0
