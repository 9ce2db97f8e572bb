"""What the code of a published row kept otherwise than the versions that the formulas follow, in bytes.

`data/published.jsonl` names the differences of each row, `data/differences.jsonl` says why each is taken and
where that was read. Every one is counted from the model's shape; no row's own measurement enters. They were
written after the disagreements had been seen, so both figures stand in the document: without and with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.blocks import block_bytes
from llmtop.profiler.memory.loss import loss_bytes
from llmtop.profiler.memory.result import Moment, Prediction
from llmtop.profiler.memory.sizes import NF4_BYTES, Sizes, quantized_weights, sizes_of

Added = Callable[[RunSpec, Sizes], int]

# `many_lengths` is no count of bytes but a simulation: `benchmarks/accuracy/lengths.py`.
EXPANDABLE_SEGMENTS = "expandable_segments"
"""The allocator's own difference: nearly nothing is held beyond what is allocated."""
PLAIN_NF4_BYTES = 0.5 + 4 / 64
"""Per weight with one fp32 scale for each block of 64, not packed a second time."""
LITGPT_CHUNK = 128
"""Positions of a chunk of LitGPT's head and loss."""


def _logits(spec: RunSpec, sizes: Sizes) -> int:
    return spec.model.vocab_size * sizes.tokens


def litgpt_block(spec: RunSpec, sizes: Sizes) -> int:
    """Bytes a token that one of LitGPT's blocks keeps, with adapters on queries and values.

    Its norms, its joint projection whose view the values are, what its adapters keep (dropout's mask and
    output, the source of `index_copy`), and where weights are packed the input of each packed matrix.
    """
    model, width = spec.model, sizes.dtype_bytes
    hidden, inner = model.hidden_size * width, model.intermediate_size * width
    query, kv = model.num_heads * model.head_dim * width, model.num_kv_heads * model.head_dim * width
    rms = 4 * model.hidden_size + 4
    if model.norm == "rms":
        norms = model.norms_per_layer * rms
    else:
        # Both norms of a parallel block read, and keep, the same input.
        norms = hidden * (1 if model.parallel_block else model.norms_per_layer) + 8 * model.norms_per_layer
    adapters = model.hidden_size + hidden + query + kv
    values = query + 2 * kv if kv == query else query
    attention = 3 * query + values + 4 * model.num_heads
    mlp = (3 if model.gated_mlp else 1) * inner
    if spec.options.quantization == "none":
        return norms + adapters + attention + mlp
    shared_norm = model.parallel_block and model.norms_per_layer == 1
    return norms + adapters + attention + mlp + hidden * (1 if shared_norm else 2) + query + inner


def _litgpt_blocks(spec: RunSpec, sizes: Sizes) -> int:
    own = litgpt_block(spec, sizes) - block_bytes(spec, sizes).saved
    return spec.model.num_layers * own * sizes.tokens


def _litgpt_loss(spec: RunSpec, sizes: Sizes) -> int:
    """Logits and log-softmax in fp32 and, chunk by chunk, the gradients of both.

    With a packed head its own backward may need more: the logits, their gradient in 16 bits, and the head
    twice, expanded in fp16 and cast.
    """
    vocab, tokens = spec.model.vocab_size, sizes.tokens
    own = 8 * vocab * (tokens + min(LITGPT_CHUNK * sizes.micro_batch, tokens))
    if spec.options.quantization != "none":
        own = max(own, 6 * vocab * tokens + 4 * sizes.head_params)
    return own - loss_bytes(spec, sizes).peak_logits


def _packed_head(spec: RunSpec, sizes: Sizes) -> int:
    kept_input = spec.model.hidden_size * sizes.dtype_bytes * sizes.tokens
    return round(sizes.head_params * (NF4_BYTES - sizes.dtype_bytes)) + kept_input


def _packed_once(spec: RunSpec, sizes: Sizes) -> int:
    """Of everything that LitGPT packs, its head too."""
    return round((PLAIN_NF4_BYTES - NF4_BYTES) * (quantized_weights(spec.model) + sizes.head_params))


THROUGHOUT: dict[str, Added] = {
    "litgpt_blocks": _litgpt_blocks,
    "packed_head": _packed_head,
    "packed_once": _packed_once,
    # A master of 4 bytes and two moments of 4, where two of 2 are left.
    "adapters_all_in_16_bits": lambda spec, sizes: -8 * sizes.trainable,
}
"""From the end of forward to the last block's backward."""
AT_LOSS: dict[str, Added] = {
    "logits_alive_in_fp32": lambda spec, sizes: 4 * _logits(spec, sizes),
    "logits_alive_in_16_bits": lambda spec, sizes: 2 * _logits(spec, sizes),
    "litgpt_loss": _litgpt_loss,
}


def added_bytes(names: Sequence[str], spec: RunSpec, prediction: Prediction) -> int:
    """To the peak of the run: its largest moment may be another with the differences."""
    sizes = sizes_of(spec)
    throughout = sum(THROUGHOUT[name](spec, sizes) for name in names if name in THROUGHOUT)
    at_loss = sum(AT_LOSS[name](spec, sizes) for name in names if name in AT_LOSS)
    largest = max(
        moment.total_bytes + throughout + (at_loss if moment.name is Moment.LOSS_BACKWARD else 0)
        for moment in prediction.moments[1:]
    )
    return largest - prediction.peak_allocated_bytes
