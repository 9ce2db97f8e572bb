"""The mask of eager attention."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.sizes import Sizes


def mask_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """The causal mask that transformers 5.x makes for eager attention (`masking_utils.py`): a number for each
    pair of positions of each sequence, in the model's precision. It is kept through the forward pass, and by
    checkpoints to the end."""
    if spec.options.attention != "eager":
        return 0
    return sizes.micro_batch * sizes.seq_len**2 * sizes.dtype_bytes
