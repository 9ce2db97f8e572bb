"""The upper bound of what a run allocates: the peak and a margin, which is wide where little is known."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.mlp import product_width
from llmtop.profiler.memory.secondary import second_ranks
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.states import overgathered_bytes, unreleased_bytes

MARGIN, CONSTANT_BYTES = 1.008, 90_000_000
"""What block ends, unlike ranks and small temporaries add. Of 200 runs on H200 that are not held out none was
beyond it but ZeRO-3 in fp32, whose cause has its own term; none of the others used more than 60 % of it."""
WIDE_MARGIN, WIDE_CONSTANT_BYTES = 1.04, 300_000_000
"""For what no run has been compared with."""
TRACED_MARGIN, TRACED_CONSTANT_BYTES = 1.08, 500_000_000
"""For traced architectures: what their backward pass makes beside the tensors that were seen is estimated."""
MEASURED_FAMILIES = frozenset({"llama", "qwen2", "qwen3", "gpt_neox", "gemma2"})
_MEASURED_ATTENTION = frozenset({"eager", "sdpa", "flash_attention_2"})


def is_measured(spec: RunSpec) -> bool:
    """Whether runs of this kind have been compared with their prediction."""
    options = spec.options
    return (
        spec.model.family in MEASURED_FAMILIES
        and spec.model.moe is None
        and second_ranks(spec) == 1
        and options.qat == "none"
        and options.attention in _MEASURED_ATTENTION
        and "nvme" not in (options.offload_optimizer, options.offload_param)
    )


def upper_bytes(spec: RunSpec, sizes: Sizes, peak_bytes: int, init_bytes: int) -> int:
    """No rank allocates more, at any time; `init_bytes` is the peak before the first step."""
    margin, constant = WIDE_MARGIN, WIDE_CONSTANT_BYTES
    if spec.model.traced is not None:
        margin, constant = TRACED_MARGIN, TRACED_CONSTANT_BYTES
    elif is_measured(spec):
        margin, constant = MARGIN, CONSTANT_BYTES
    within_a_pass = overgathered_bytes(spec, sizes) + _while_packed(spec, sizes)
    beyond = max(unreleased_bytes(spec, sizes), within_a_pass)
    return round(max(peak_bytes * margin, init_bytes)) + constant + beyond


def _while_packed(spec: RunSpec, sizes: Sizes) -> int:
    """What a product of a packed matrix makes and drops: a 4-bit one the whole weight, an 8-bit one copies of
    its input. Simulated; in no recorded run it was at the peak."""
    if spec.options.quantization == "nf4":
        return sizes.wide_linear * sizes.dtype_bytes
    return 2 * product_width(spec.model) * sizes.tokens if spec.options.quantization == "int8" else 0
