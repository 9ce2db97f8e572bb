"""Device memory of NCCL beyond what it takes within a node: buffers to other nodes, tables of all ranks.

By NCCL's sources; no run over nodes has been compared with it yet.
"""

from __future__ import annotations

from llmtop.presets.spec import RunSpec

BUFFER_BYTES = (1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
"""Of one connection one way: Simple's 4 MiB, LL128's and LL's (NCCL 2.28 src/init.cc: DEFAULT_*_BUFFSIZE)."""
CHANNELS = 16
"""Over nodes: two for each of the eight network cards of a node (what NCCL logs on HGX boards)."""
MOST_CHILDREN = 3
"""Of a node in NCCL's double binary tree: one above, two below."""
RANK_BYTES = 4 * 152 + 8 + 4
"""Of each channel for each rank of the job: four `ncclConnInfo`, a pointer, its place in the ring
(NCCL 2.28 src/channel.cc:initChannel, src/include/device.h)."""


def network_bytes(spec: RunSpec) -> int:
    """Of one GPU; 0 on one node."""
    options = spec.options
    if options.nodes == 1:
        return 0
    # The channels' places at a node's border are spread over its GPUs.
    channels = -(-CHANNELS // min(options.gpus, CHANNELS))
    neighbours = min(MOST_CHILDREN, options.nodes - 1)
    buffers = channels * 2 * BUFFER_BYTES * (1 + neighbours)
    return buffers + spec.world_size * CHANNELS * RANK_BYTES
