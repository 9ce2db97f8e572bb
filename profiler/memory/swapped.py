"""What DeepSpeed's swapping to a drive keeps in host memory, and what of the states lies on the drive.

Follows deepspeed 0.19.8 `runtime/swap_tensor/partitioned_param_swapper.py`, `swap_tensor/utils.py` and
`zero/stage3.py`, under which alone it swaps.
"""

from __future__ import annotations

from llmtop.presets.rules_deepspeed import raw
from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.cost.shape import tensors
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.states import sub_group_elements

STATE_BYTES = 12
"""Of an element in a swapped optimizer: the fp32 master and Adam's two moments."""
MOMENT_BYTES = 8
"""Of an element: the two moments among them."""
GRADIENT_BYTES = 4
"""Of an element: its fp32 gradient, written at the end of backward and read in the step."""
SMALLEST_BYTES = 1 << 20
"""What is smaller stays in memory (`swap_tensor/utils.py:MIN_AIO_BYTES`)."""
OPTIMIZER_BUFFERS = 4
"""`offload_optimizer.buffer_count` of deepspeed 0.19.8."""
PARAM_BUFFERS = 5
"""`offload_param.buffer_count` of deepspeed 0.19.8."""
PARAM_BUFFER_ELEMENTS = 100_000_000
"""`offload_param.buffer_size` of deepspeed 0.19.8."""
MAX_IN_CPU = 1_000_000_000
"""`offload_param.max_in_cpu` of deepspeed 0.19.8, in elements."""


def max_in_cpu(spec: RunSpec) -> int:
    """Elements of a rank's parameters that stay in host memory under `offload_param = nvme`."""
    return _given(spec, "offload_param.max_in_cpu", MAX_IN_CPU)


def swaps_optimizer(spec: RunSpec, sizes: Sizes) -> bool:
    """Whether a rank's optimizer states are large enough to be swapped."""
    return spec.options.offload_optimizer == "nvme" and 4 * sub_group_elements(sizes) >= SMALLEST_BYTES


def optimizer_buffer_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """Of one rank: buffers of the largest sub-group in fp32, through which states and gradients go."""
    if spec.options.offload_optimizer != "nvme":
        return 0
    count = _given(spec, "offload_optimizer.buffer_count", OPTIMIZER_BUFFERS)
    return count * 4 * sub_group_elements(sizes)


def param_buffer_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """Of one rank: buffers in the model's precision through which its weights come, whatever their number,
    and one through which those of a sub-group go back after the step."""
    if not _swaps_weights(spec):
        return 0
    count = _given(spec, "offload_param.buffer_count", PARAM_BUFFERS)
    elements = count * _given(spec, "offload_param.buffer_size", PARAM_BUFFER_ELEMENTS)
    if sizes.shard > max_in_cpu(spec):
        elements += sub_group_elements(sizes)
    return elements * sizes.dtype_bytes


def flat_param_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """Of one rank: the buffer for weights that stay in host memory under `offload_param = nvme`."""
    return sizes.dtype_bytes * min(sizes.shard, max_in_cpu(spec)) if _swaps_weights(spec) else 0


def kept_param_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """Of one rank: weights that stay in host memory under `offload_param = nvme`.

    Sub-groups are in the flat buffer or not at all (`zero/stage3.py:
    _create_fp16_partitions_with_defragmentation`); of the others the small weights stay too.
    """
    if not _swaps_weights(spec):
        return 0
    group, most = sub_group_elements(sizes), max_in_cpu(spec)
    if sizes.shard <= most:
        return sizes.dtype_bytes * sizes.shard
    whole = most // group * group
    return sizes.dtype_bytes * min(sizes.shard, whole + _small_elements(spec.model, sizes))


def _swaps_weights(spec: RunSpec) -> bool:
    return spec.options.offload_param == "nvme"


def _small_elements(model: ModelShape, sizes: Sizes) -> int:
    """Of one rank's trained weights, those whose part is too small to be swapped; adapters' always are."""
    if sizes.lora_rank:
        return sizes.shard
    return sum(
        group.count * part
        for group in tensors(model)
        if (part := -(-group.numel // sizes.ranks)) * sizes.dtype_bytes < SMALLEST_BYTES
    )


def on_drive_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """Of one rank: files on the drive. Weights that stay in memory were written there first."""
    options = spec.options
    states = (STATE_BYTES + GRADIENT_BYTES) * sizes.shard if options.offload_optimizer == "nvme" else 0
    return states + (sizes.dtype_bytes * sizes.shard if _swaps_weights(spec) else 0)


def _given(spec: RunSpec, key: str, usual: int) -> int:
    value = raw(spec, f"zero_optimization.{key}")
    return int(value) if isinstance(value, int | float) else usual
