"""Host memory of one node: what offload keeps there, pinned or not, and the ranks' own processes."""

from __future__ import annotations

from llmtop.presets.rules_deepspeed import raw
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import HostBytes
from llmtop.profiler.memory.sizes import Sizes

LIBRARY_BYTES = 1_200_000_000
"""Pages of libraries that the ranks of a node share, in whose PSS each has its part."""
RANK_PROCESS_BYTES = 900_000_000
"""A CUDA rank's own beside them, without offload (H200: one rank 1.9 to 2.1 GB, two 2.8 to 3.8 GB)."""
STATE_BYTES = 12
"""Of an element in a swapped optimizer: the fp32 master and Adam's two moments."""
GRADIENT_BYTES = 4
"""Of an element: its fp32 gradient, written at the end of backward and read in the step."""
NVME_BUFFERS = 4
"""`offload_optimizer.buffer_count` of deepspeed 0.19.8."""
MAX_IN_CPU = 1_000_000_000
"""`offload_param.max_in_cpu` of deepspeed 0.19.8, in elements."""


def max_in_cpu(spec: RunSpec) -> int:
    """Elements of a rank's parameters that stay in host memory under `offload_param = nvme`."""
    given = raw(spec, "zero_optimization.offload_param.max_in_cpu")
    return int(given) if isinstance(given, int | float) else MAX_IN_CPU


def pinned_block(size_bytes: int) -> int:
    """Bytes that torch's pinned allocator takes for one block: the next power of two (pytorch#95823)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_bytes(spec: RunSpec, sizes: Sizes) -> HostBytes:
    """Per node. Follows deepspeed 0.19.8 `zero/stage_1_and_2.py` and `zero/stage3.py` under offload."""
    ranks = spec.options.gpus
    pinned, pageable, nvme = _offloaded(spec, sizes)
    parts = {
        "processes": LIBRARY_BYTES + ranks * RANK_PROCESS_BYTES,
        "pinned": ranks * pinned,
        "pageable": ranks * pageable,
    }
    return HostBytes(
        total_bytes=sum(parts.values()),
        pinned_bytes=parts["pinned"],
        nvme_bytes=ranks * nvme,
        components={name: size for name, size in parts.items() if size},
    )


def _offloaded(spec: RunSpec, sizes: Sizes) -> tuple[int, int, int]:
    """(pinned, pageable, NVMe) bytes of one rank."""
    options, width, shard = spec.options, sizes.dtype_bytes, sizes.shard
    blocks: list[int] = []
    pageable = nvme = 0
    pin_optimizer = sizes.zero.optimizer_pin_memory
    if options.offload_optimizer == "cpu":
        pageable += 8 * shard  # the two moments
        if sizes.stage in (1, 2):
            blocks += [4 * shard, 4 * shard, width * shard]  # master, fp32 gradients, 16-bit staging
            if options.grad_accum > 1:
                pageable += width * sizes.held_gradients
        else:
            pageable += 4 * shard
            blocks += [4 * shard, width * shard]
    elif options.offload_optimizer == "nvme":
        nvme += (STATE_BYTES + GRADIENT_BYTES) * shard
        sub_group = min(shard, sizes.zero.sub_group_size)
        blocks += [NVME_BUFFERS * 4 * sub_group, 4 * shard, width * shard]
    if options.offload_param == "cpu":
        weights = width * shard + -(-sizes.frozen_bytes // sizes.ranks)
        pinned_params = pinned_block(weights)
    elif options.offload_param == "nvme":
        nvme += width * shard
        kept = min(shard, max_in_cpu(spec))
        pinned_params = pinned_block(5 * 100_000_000 * width) + pinned_block(width * kept)
    else:
        pinned_params = 0
    pinned = pinned_params
    if pin_optimizer:
        pinned += sum(map(pinned_block, blocks))
    else:
        pageable += sum(blocks)
    return pinned, pageable, nvme
