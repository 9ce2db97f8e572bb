"""Bytes that one transformer block keeps for its backward pass, and what that pass needs on top.

Counted tensor by tensor from the modelling code of transformers 5.x with torch's autograd rules (what
each operation saves), per token of the micro-batch, and checked against H200 runs: one Llama-3.2-1B
block keeps 108,680 bytes a token by this arithmetic.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.spec import DTYPE_BYTES, ModelShape, RunSpec, Traced, TracedCost
from llmtop.profiler.cost.flops import windowed_layers
from llmtop.profiler.memory.latent import latent_output_copied
from llmtop.profiler.memory.mlp import fused_experts, mlp_backward, mlp_saved, product_width
from llmtop.profiler.memory.qat import qat_bytes
from llmtop.profiler.memory.sizes import Sizes

ROTARY_BY_CONCATENATION = frozenset(
    {"phi3", "phi", "gpt_neox", "glm", "glm4", "glm4_moe", "stablelm", "nemotron", "gpt_oss"}
)
"""Families whose rotary code joins parts, so queries lose the layout that lets attention skip a copy."""
FP32_NORMALIZED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "olmo2", "olmo3"})
"""RMSNorms that multiply by the weight in fp32 and so keep the normalized value in fp32."""


POST_NORM = frozenset({"olmo2", "olmo3", "exaone4"})
"""Families that normalize what attention and MLP return, not what they read."""
SOFTMAX_AS_IT_IS = frozenset({"falcon", "gpt2", "gpt_oss", "llama4_text"})
"""Families whose eager attention does not upcast its softmax."""


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
    saved_weights: int = 0
    """Bytes whatever the tokens, kept as `saved` is: the copies of weights that fake quantization makes."""
    weights_freed: int = 0
    """Of `saved_weights`, what is already gone when the transient of `backward_extra` is alive."""


def final_norm_saved(spec: RunSpec, sizes: Sizes) -> int:
    """Bytes per token kept by the norm before the head, its output included where the head is trained."""
    model, width = spec.model, sizes.dtype_bytes
    if model.traced is not None:
        return traced_cost(spec, model.traced).outside_bytes
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
        return (12 if trained else 8) * columns + 4
    if model.norm == "layer":
        # OLMo's is computed in fp32.
        return columns * (4 if model.family == "olmo" else sizes.dtype_bytes) + 8 * rows
    normalized = 4 if model.family in FP32_NORMALIZED else sizes.dtype_bytes
    return columns * (4 + (normalized if trained else 0)) + 4 * rows


def _liger_norm(model: ModelShape, sizes: Sizes) -> bool:
    return ("rms_norm" if model.norm == "rms" else "layer_norm") in sizes.liger


def _attention_saved(spec: RunSpec, sizes: Sizes) -> int:
    """Queries, keys, values, output and statistics of the attention, with the square terms of eager."""
    model = spec.model
    if model.mla is not None:
        return _latent_attention_saved(spec, sizes)
    query = model.num_heads * model.head_dim
    kv = model.num_kv_heads * model.head_dim
    norms = _query_key_norms(spec, sizes, query, kv)
    unmasked = _unmasked_attention(spec, sizes, query, kv)
    masked = masked_blocks(spec)
    if not masked:
        return norms + unmasked
    share = masked / model.num_layers
    return norms + round(unmasked * (1 - share) + _masked_attention(spec, sizes, query, kv) * share)


def _unmasked_attention(spec: RunSpec, sizes: Sizes, query: int, kv: int) -> int:
    """Where causality is all that hides keys."""
    model, width, heads = spec.model, sizes.dtype_bytes, spec.model.num_heads
    if _one_key_for_many_heads(spec):
        # Plain mathematics in fp32.
        return query * width + 3 * 4 * query + heads * sizes.seq_len * eager_square(spec, width)
    if plain_attention(spec):
        # Keys and values are repeated to every head. With sinks a head has one score more, and the place of
        # its largest is kept (transformers 5.24, `modeling_gpt_oss.py:eager_attention_forward`).
        sinks = heads * (width + 8) if model.attention_sinks else 0
        # The values of one sequence alone are no copy: they keep the whole projection alive.
        whole = 2 * query if model.family in ("gpt_neox", "phi3") and kv == query else 0
        whole = whole * width if sizes.micro_batch == 1 else 0
        in_fp32 = 2 * query * (4 - width) if model.family in ("gptj", "codegen") and width < 4 else 0
        square = heads * sizes.seq_len * eager_square(spec, width)
        return 4 * query * width + whole + in_fp32 + square + sinks
    values = kv
    if model.fused_qkv and model.family not in ("gpt2", "gpt_bigcode", "codegen"):
        values = query + 2 * kv  # the values are a view that keeps the whole projection alive
    copied = query if _output_copied(spec, sizes) else 0
    return (2 * query + kv + values + copied) * width + 4 * heads


def _output_copied(spec: RunSpec, sizes: Sizes) -> bool:
    """Whether what attention gives is copied on its way to the last matrix, and kept as that copy too."""
    if plain_attention(spec):
        return True
    if spec.model.family in ("gpt2", "gpt_bigcode") or (spec.options.precision == "fp32" and not spec.on_cpu):
        # Without rotary positions queries, keys and values are views of one projection, counted once.
        # On CUDA fp32 takes the memory-efficient kernel, whose output has the layout that is wanted.
        return False
    # Liger rotates in place of the layout that attention reads.
    return spec.model.family in ROTARY_BY_CONCATENATION and "rope" not in sizes.liger


def masked_blocks(spec: RunSpec) -> int:
    """Blocks to whose SDPA transformers gives a mask: those with a window that is not longer than a sequence.

    Falcon's code always makes one (transformers 5.24, `models/falcon/modeling_falcon.py`); with one key for
    all heads, which no fused kernel takes, nothing of it is kept.
    """
    model, options = spec.model, spec.options
    if options.attention != "sdpa":
        return 0
    if model.family == "falcon":
        return model.num_layers if model.num_kv_heads > 1 else 0
    window = model.sliding_window
    return windowed_layers(spec) if window is not None and options.seq_len >= window else 0


def _masked_attention(spec: RunSpec, sizes: Sizes, query: int, kv: int) -> int:
    """SDPA with a mask: keys and values are repeated to every head, and a mask of truth values becomes one of
    numbers in each block. One with ALiBi's slopes has numbers already, which all blocks share.

    transformers 5.24, `integrations/sdpa_attention.py:use_gqa_in_sdpa`; torch 2.13,
    `aten/src/ATen/native/transformers/attention.cpp:convert_boolean_attn_mask`.
    """
    model, width = sizes.model, sizes.dtype_bytes
    fused = query + 2 * kv if model.fused_qkv and model.family != "falcon" else kv
    # One key for all heads is repeated without a copy.
    repeated = (kv != query and model.num_kv_heads > 1) or model.family == "falcon"
    keys, values = (query, query) if repeated else (kv, fused)
    mask = 0 if spec.hf_config.get("alibi") else sizes.seq_len
    # CUDA's memory-efficient kernel returns the layout that is wanted; the CPU's takes the queries'.
    copied = query if spec.on_cpu and model.family in ROTARY_BY_CONCATENATION else 0
    return (2 * query + keys + values + copied + mask) * width + 4 * model.num_heads


def plain_attention(spec: RunSpec) -> bool:
    """Whether attention makes whole score matrices: eager, and SDPA where torch has no kernel for the case.

    On CUDA, grouped heads in fp32 have none (flash takes 16 bits only, the memory-efficient kernel no
    groups): torch falls back to plain mathematics. Measured on H200 with torch 2.11.
    """
    options, model = spec.options, spec.model
    if options.attention == "eager" or _one_key_for_many_heads(spec):
        return True
    grouped = model.num_kv_heads != model.num_heads
    return options.attention == "sdpa" and options.precision == "fp32" and grouped and not spec.on_cpu


def _one_key_for_many_heads(spec: RunSpec) -> bool:
    """Falcon-7B under SDPA: its code repeats no key, which no fused kernel takes."""
    model = spec.model
    one_key = model.family == "falcon" and model.num_kv_heads == 1 and model.num_heads > 1
    return one_key and spec.options.attention == "sdpa"


def eager_square(spec: RunSpec, width: int) -> int:
    """Bytes that eager attention keeps per score: softmax in fp32, and again in the model's precision.

    With dropout on the scores also what it lets through, and for each whether it did.
    """
    model = spec.model
    capped = width if model.attention_softcap else 0
    dropped = 1 + width if model.score_dropout else 0
    if _one_key_for_many_heads(spec):
        return 4
    if model.family in SOFTMAX_AS_IT_IS:
        return width + dropped
    return capped + 4 + (dropped or (width if width < 4 else 0))


def _softmax_backward(spec: RunSpec, sizes: Sizes) -> tuple[int, int]:
    """Transient and already freed bytes per token while the softmax of plain attention is differentiated.

    Beside the softmax that is still kept there are its gradient, the product of both, and the result: torch
    2.11, `aten/src/ATen/native/cuda/SoftMax.cu:softmax_backward_cuda_out`. The result has 16 bits for fp16
    alone, whose conversion is part of the kernel (`SoftMax.cpp:softmax`). The product with the values is
    done: its copies of weights and values are gone, and the gradient of the values is there.
    """
    model, width = spec.model, sizes.dtype_bytes
    own_width = model.family in SOFTMAX_AS_IT_IS and spec.options.attention == "eager"
    softmax = width if own_width else 4
    result = width if own_width or spec.options.precision == "fp16" else 4
    copies = eager_square(spec, width) - softmax if spec.options.attention == "eager" else 0
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
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): compressed and expanded heads.

    transformers 5.24, `models/deepseek_v3/modeling_deepseek_v3.py:DeepseekV3Attention`.
    """
    model, width, mla = spec.model, sizes.dtype_bytes, spec.model.mla
    assert mla is not None
    heads, key = model.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    # A norm on each latent, and its output for the gradient of the next matrix; in fp32 the norm keeps the
    # projection itself, rotary part and all.
    ranks = [rank for rank in (mla.kv_lora_rank, mla.q_lora_rank) if rank is not None]
    latents = sum(_norm(model, sizes, trained=sizes.lora_rank == 0, width=rank) for rank in ranks)
    latents += sum(ranks) * width if sizes.attention_adapted else 0
    latents += mla.qk_rope_head_dim * width if width == 4 else 0
    queries_and_keys = 2 * heads * key * width
    if spec.options.attention == "eager":
        square = heads * sizes.seq_len * eager_square(spec, width)
        return latents + queries_and_keys + 2 * heads * mla.v_head_dim * width + square
    if spec.options.attention != "sdpa":
        # FlashAttention takes heads of one width: values are padded to the keys' and its output cropped.
        cropped = mla.v_head_dim if mla.v_head_dim != key else 0
        return latents + 2 * queries_and_keys + heads * (cropped * width + 4)
    # The values are a view that keeps what they were projected with alive: the keys' unrotated part.
    values = heads * (mla.qk_nope_head_dim + mla.v_head_dim) * width
    outputs = 2 if latent_output_copied(spec) and sizes.attention_adapted else 1
    return latents + queries_and_keys + values + heads * (outputs * mla.v_head_dim * width + 4)


def traced_cost(spec: RunSpec, traced: Traced) -> TracedCost:
    """The costs that were traced for the run's attention, precision and length."""
    eager = spec.options.attention == "eager" or "sdpa" not in traced.attentions
    fitting = [
        cost
        for cost in traced.costs
        if (cost.attention == "eager") == eager
        and cost.adapters == bool(spec.options.lora_rank)
        and cost.width == DTYPE_BYTES[spec.options.precision]
        and cost.from_length <= spec.options.seq_len
    ]
    return max(fitting, key=lambda cost: cost.from_length)


def _traced_block(spec: RunSpec, sizes: Sizes, traced: Traced) -> BlockBytes:
    """A block as it was traced; what its backward makes beside it as in other families."""
    cost, hidden = traced_cost(spec, traced), spec.model.hidden_size * sizes.dtype_bytes
    adapters = sizes.lora_modules * sizes.lora_rank * sizes.dtype_bytes
    extra, freed = mlp_backward(spec, sizes)
    in_attention = False
    qat = qat_bytes(spec, sizes.dtype_bytes, output_copied=False)
    if plain_attention(spec):
        in_softmax, given_back = _softmax_backward(spec, sizes)
        if in_softmax - given_back > extra - freed:
            extra, freed, in_attention = in_softmax, given_back, True
    return BlockBytes(
        saved=cost.saved_bytes
        + qat.token_saved
        + round(cost.saved_bytes_per_key * sizes.seq_len)
        + cost.fixed_bytes // sizes.tokens
        + adapters,
        input_saved=hidden if cost.keeps_input else 0,
        backward_extra=extra,
        backward_freed=freed,
        peak_in_attention=in_attention,
        gradient=hidden,
        saved_weights=qat.block_saved,
    )


def block_bytes(spec: RunSpec, sizes: Sizes) -> BlockBytes:
    """Everything about one block, per token."""
    model, width = spec.model, sizes.dtype_bytes
    if model.traced is not None:
        return _traced_block(spec, sizes, model.traced)
    hidden = model.hidden_size * width
    trained = sizes.lora_rank == 0
    norm = _norm(model, sizes, trained=trained)
    norms = max(1, model.norms_per_layer) * norm
    # Norms after attention and MLP (Gemma-2) feed an addition, which keeps nothing of their output.
    mlp_reads = sizes.mlp_adapted or fused_experts(model, sizes)
    outputs = (1 if sizes.attention_adapted else 0) + (1 if mlp_reads else 0)
    if model.norms_per_layer == 1:
        outputs = min(outputs, 1)  # attention and MLP read the same norm's output
    keeps_input = _keeps_input(model, sizes)
    input_saved = hidden if keeps_input else 0
    if model.parallel_block and keeps_input and model.norms_per_layer == 2:
        norms -= hidden  # both norms read, and keep, the same input
    adapters = sizes.lora_modules * sizes.lora_rank * width + _rotary_tables(model, sizes)
    attention = _attention_saved(spec, sizes)
    masks = _dropout_masks(model)
    mlp = mlp_saved(spec, sizes)
    qat = qat_bytes(spec, width, output_copied=_output_copied(spec, sizes))
    saved = norms + outputs * hidden - _unread_outputs(sizes) + attention + mlp + adapters + masks
    saved += qat.token_saved
    extra, freed = mlp_backward(spec, sizes)
    after_mlp = _last_norm_backward(model, sizes)
    after_mlp_first = after_mlp > extra - freed
    if after_mlp_first:
        extra, freed = after_mlp, 0
    in_attention = False
    if plain_attention(spec):
        in_softmax, given_back = _softmax_backward(spec, sizes)
        # By then the MLP half of the block has given its memory back.
        given_back += mlp + norm + hidden
        if spec.options.quantization == "int8":
            given_back -= hidden + product_width(model) * width  # inputs of its matrices
        if model.parallel_block:
            in_softmax += hidden  # the gradient of the MLP's input waits for attention's
        if in_softmax - given_back > extra - freed:
            extra, freed, in_attention, after_mlp_first = in_softmax, given_back, True, False
    return BlockBytes(
        saved=saved,
        input_saved=input_saved,
        backward_extra=extra,
        backward_freed=freed,
        peak_in_attention=in_attention,
        gradient=hidden,
        saved_weights=qat.block_saved,
        weights_freed=0 if after_mlp_first else qat.attention_freed if in_attention else qat.mlp_freed,
    )


def _unread_outputs(sizes: Sizes) -> int:
    """Of the norms before MLPs those that only frozen experts read, as the mean of all blocks."""
    model, moe = sizes.model, sizes.model.moe
    if not sizes.lora_rank or not sizes.mlp_adapted or moe is None or moe.shared_intermediate_size:
        return 0
    if fused_experts(model, sizes):
        return 0  # Liger's call keeps its input whatever is frozen
    sparse = model.num_layers - moe.first_dense_layers
    return sparse * model.hidden_size * sizes.dtype_bytes // model.num_layers


def _last_norm_backward(model: ModelShape, sizes: Sizes) -> int:
    """Transient of a norm after the MLP, the first to be differentiated, when all of the block is still kept.

    Followed on the meta device: copies in fp32 and 16 bits of the hidden state's gradient and its products.
    """
    after_mlp = model.norms_per_layer == 4 or model.family in POST_NORM
    if not after_mlp or sizes.dtype_bytes == 4 or _liger_norm(model, sizes):
        return 0
    return (16 if model.family in FP32_NORMALIZED else 18) * model.hidden_size


def _keeps_input(model: ModelShape, sizes: Sizes) -> bool:
    """Whether something keeps the block's own input: a norm that does not upcast it, or a matrix."""
    if model.family in POST_NORM:
        return sizes.lora_rank == 0 or sizes.attention_adapted
    if _liger_norm(model, sizes):
        return True
    if model.family.startswith("cohere"):
        return False
    return sizes.dtype_bytes == 4 or (model.norm == "layer" and model.family != "olmo")


def _rotary_tables(model: ModelShape, sizes: Sizes) -> int:
    """Families whose every block makes cosines and sines of its own; all sequences share them.

    transformers 5.24, `modeling_glm4.py` (of half of each head) and `modeling_ernie4_5.py` (in fp32).
    """
    if model.family in ("glm", "glm4"):
        return model.head_dim * sizes.dtype_bytes // sizes.micro_batch
    return 8 * model.head_dim // sizes.micro_batch if model.family == "ernie4_5" else 0


def _dropout_masks(model: ModelShape) -> int:
    """One byte an element for each dropout on the hidden state, after attention and after the MLP."""
    return 2 * model.hidden_size if model.dropout else 0
