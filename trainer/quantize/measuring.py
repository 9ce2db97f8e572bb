"""What it takes to measure a model's perplexity: host memory, and how much text is read at a time.

Weights are read module by module (`trainer.worker.packing.streaming`), so that what is needed grows with the
largest module and not with the model; what bitsandbytes packed is loaded whole.
"""

from __future__ import annotations

from llmtop.presets.spec import ModelShape
from llmtop.profiler.cost.shape import Role, param_count, tensors
from llmtop.profiler.memory.loading import packed_bytes
from llmtop.trainer.quantize.families import known_family
from llmtop.trainer.quantize.target import Target

LOGITS_BYTES = 128 << 20
"""Of the logits that are computed at a time, in 32 bits."""
_LOGITS = 4
"""Copies of them on the way to a loss: two of the model's own code, two of the loss."""
_HEAD_BYTES = 128 << 20
"""Of a piece of the projection to logits, as it is kept and as it is computed with."""
_PASSING_BYTES = 384 << 20
"""Of what passes through a block at a time, at most, but for a single window that takes more."""
_MOST_ROWS = 32
_PASSING_HIDDEN, _PASSING_WIDTH = 8, 3
"""Copies of a token's hidden states and of its MLP's inner ones that are alive at once."""
_WIDE = 4
_TORCH_BYTES = 1 << 30
"""Of a process that has torch and transformers loaded."""


def rows_at_once(shape: ModelShape, window: int) -> int:
    """How many windows of text pass through a block beside each other."""
    return max(1, min(_MOST_ROWS, _PASSING_BYTES // _passing_bytes(shape, window)))


def measuring_bytes(shape: ModelShape, target: Target, window: int, width: int) -> int:
    """Host memory at the peak, with weights of so many bytes each. Of a host without a GPU."""
    passing = rows_at_once(shape, window) * _passing_bytes(shape, window)
    logits = min(LOGITS_BYTES, _WIDE * window * shape.vocab_size)
    head = min(_HEAD_BYTES, 2 * _WIDE * shape.hidden_size * shape.vocab_size)
    more = _TORCH_BYTES + passing + _LOGITS * logits + head
    streamed = width * _largest_module(shape)
    if known_family(shape) is None:
        # Whose modules may reach for each other's weights: such a model is loaded whole.
        streamed = width * param_count(shape)
    whole = 0 if target.packer == "gguf" else packed_bytes(shape, target.kind)
    return more + max(streamed, whole)


def _largest_module(shape: ModelShape) -> int:
    """Weights that one module has for itself. Experts of a block are one; embedding and head are cut."""
    experts = sum(group.numel for group in tensors(shape) if group.role is Role.EXPERT)
    ends = (Role.EMBEDDING, Role.HEAD, Role.EXPERT)
    return max(experts, *(group.numel for group in tensors(shape) if group.role not in ends))


def _passing_bytes(shape: ModelShape, window: int) -> int:
    width = max(shape.intermediate_size, shape.moe.expert_intermediate_size if shape.moe else 0)
    numbers = _PASSING_HIDDEN * shape.hidden_size + _PASSING_WIDTH * width
    return _WIDE * window * numbers
