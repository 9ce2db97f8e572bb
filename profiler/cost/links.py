"""How fast the ranks of a run reach each other: over the links of a node, and between nodes.

A ring of all ranks crosses the border of each node as often as there are network cards, so the cards of a
node work together, and a collective goes at the rate of the slower of the two kinds of link
(NVIDIA nccl-tests, doc/PERFORMANCE.md: bus bandwidth). Its latency is that of NCCL's own model.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.spec import RunSpec

LINK_EFFICIENCY = 0.75
"""Of a link's rate that a step's collectives reach (fitted to runs on two H200)."""
BITS = 8
BASE_SECONDS = 8.4e-6
"""Of a collective in a ring, as the next ones by NCCL 2.28 src/graph/tuning.cc, Simple protocol."""
NVLINK_HOP_SECONDS, PCIE_HOP_SECONDS, NETWORK_HOP_SECONDS = 3.4e-6, 5.7e-6, 14.0e-6
PCIE_FALLBACK = 16e9
"""Where a preset does not tell its PCIe: generation 3 with 16 lanes."""


class Links(Struct, frozen=True, kw_only=True):
    """Of one run. Rates are bytes a second, each way."""

    inside: float
    """Of one GPU to the others of its node."""
    between: float | None
    """Of a whole node to the others; None on one node, or where it is not known."""
    ranks: int
    nodes: int
    hop_seconds: float
    """From one GPU to the next within a node."""

    @property
    def known(self) -> bool:
        return self.nodes == 1 or self.between is not None

    def collective(self, moved_bytes: float, times: float = 1.0, ranks: int | None = None) -> float:
        """Seconds in which every rank sends and receives so many bytes, in `times` collectives.

        `ranks`: of a group within a node in place of all. Only with `known` links.
        """
        alone = ranks is not None and ranks <= self.ranks // self.nodes
        if self.nodes == 1 or alone:
            return moved_bytes / self.inside
        assert self.between is not None
        rate = self.between if self.ranks == self.nodes else min(self.inside, self.between)
        return moved_bytes / rate + times * self.latency

    @property
    def latency(self) -> float:
        """Of one all-gather or reduce-scatter over all ranks of several nodes."""
        hops, crossings = self.ranks - 1, self.nodes - 1
        return BASE_SECONDS + (hops - crossings) * self.hop_seconds + crossings * NETWORK_HOP_SECONDS


def links_of(spec: RunSpec) -> Links:
    gpu, options = spec.gpu, spec.options
    inside = (gpu.nvlink_bytes_per_second or gpu.pcie_bytes_per_second or PCIE_FALLBACK) * LINK_EFFICIENCY
    between = node_bytes_per_second(spec)
    return Links(
        inside=inside,
        between=None if between is None else between * LINK_EFFICIENCY,
        ranks=spec.world_size,
        nodes=options.nodes,
        hop_seconds=NVLINK_HOP_SECONDS if gpu.nvlink_bytes_per_second else PCIE_HOP_SECONDS,
    )


def node_bytes_per_second(spec: RunSpec) -> float | None:
    """What all network cards of a node carry, each way; None on one node or where it is not known."""
    options = spec.options
    if options.nodes == 1:
        return None
    if options.inter_node_gbps is not None:
        return options.inter_node_gbps * 1e9 / BITS
    each = spec.gpu.network_bytes_per_second
    return None if each is None else each * options.gpus
