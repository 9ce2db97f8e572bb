"""What a topology means: the matrix that people know from `nvidia-smi topo -m`, and what is wrong with it."""

from __future__ import annotations

import re
from typing import NamedTuple

from llmtop.profiler.record.deviceevents import Topology, TopologyDevice, TopologyPair
from llmtop.profiler.units import NOT_AVAILABLE, format_rate

_CPUS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_MOST_CPUS = 1 << 16
"""Linux counts to 8,192."""
ROADS: dict[str, str] = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the processor's PCIe",
    "NODE": "PCIe within a NUMA node",
    "SYS": "the link between processors",
}


class Problem(NamedTuple):
    key: str
    what: str
    fix: str


def matrix(topology: Topology) -> list[list[str]]:
    """Rows of cells, the first row the heads: a road for each two devices, then NUMA node and processors."""
    indices = [device.index for device in topology.devices]
    roads = {(pair.first, pair.second): pair.road or NOT_AVAILABLE for pair in topology.pairs}
    rows = [["", *(f"GPU{index}" for index in indices), "NUMA", "near CPUs"]]
    for device in topology.devices:
        cells = [
            "X"
            if other == device.index
            else roads.get((min(device.index, other), max(device.index, other)), NOT_AVAILABLE)
            for other in indices
        ]
        numa = NOT_AVAILABLE if device.numa_node is None else str(device.numa_node)
        rows.append([f"GPU{device.index}", *cells, numa, device.cpus or NOT_AVAILABLE])
    return rows


def legend(topology: Topology) -> list[tuple[str, str]]:
    """The letters of the matrix and what they mean, those alone that stand in it."""
    used = {pair.road for pair in topology.pairs if pair.road is not None}
    links = [("NV#", "that many NVLinks")] if any(road.startswith("NV") for road in used) else []
    return links + [(road, words) for road, words in ROADS.items() if road in used]


def pcie_words(generation: int | None, width: int | None) -> str:
    """`gen5 x16`."""
    if generation is None and width is None:
        return NOT_AVAILABLE
    return f"gen{generation if generation is not None else '?'} x{width if width is not None else '?'}"


def nvlink_words(device: TopologyDevice) -> str:
    """`18 links to switches, 445 GiB/s each way`."""
    if device.nvlinks is None:
        return NOT_AVAILABLE
    if device.nvlinks == 0:
        return "no link is up"
    to = {"switch": " to switches", "gpu": " to GPUs"}.get(device.nvlink_peer or "", "")
    speed = device.nvlink_bytes_per_second
    return f"{device.nvlinks} links{to}" + ("" if speed is None else f", {format_rate(speed)} each way")


def problems(topology: Topology) -> list[Problem]:
    """What makes training slower here than the devices would allow."""
    return [*_missing_nvlink(topology), *_narrow_pcie(topology), *_far_cpus(topology)]


def _missing_nvlink(topology: Topology) -> list[Problem]:
    found = []
    without = [pair for pair in topology.pairs if pair.road is not None and not pair.nvlinks]
    if without:
        named = ", ".join(f"{pair.first} and {pair.second}" for pair in without[:4])
        more = f" and {len(without) - 4} more pairs" if len(without) > 4 else ""
        ways = sorted({_road_words(pair) for pair in without})
        found.append(
            Problem(
                "no_nvlink",
                f"GPU {named}{more}: no NVLink between them, traffic takes {' or '.join(ways)}",
                "if there should be NVLink: nvidia-smi nvlink --status, and the fabric manager if there are "
                "NVSwitches; without it, exchange less: a lower --zero stage, more --grad-accum",
            )
        )
    refused = [pair for pair in topology.pairs if pair.peer_access is False]
    if refused:
        named = ", ".join(f"{pair.first} and {pair.second}" for pair in refused[:4])
        found.append(
            Problem(
                "no_peer_access",
                f"GPU {named}: no direct access to each other's memory; NCCL copies through host memory",
                "switch PCIe ACS off in the BIOS, or leave the virtual machine that hides the PCIe tree",
            )
        )
    return found


def _road_words(pair: TopologyPair) -> str:
    return ROADS.get(pair.road or "", pair.road or NOT_AVAILABLE)


def _narrow_pcie(topology: Topology) -> list[Problem]:
    """Of the width only: the generation falls when a device idles, to save power."""
    return [
        Problem(
            "narrow_pcie",
            f"GPU {device.index} uses {device.pcie_width} of {device.pcie_width_max} PCIe lanes",
            "put it into a wider slot, or seat it and its riser again; offload feels this most",
        )
        for device in topology.devices
        if device.pcie_width is not None
        and device.pcie_width_max is not None
        and device.pcie_width < device.pcie_width_max
    ]


def _far_cpus(topology: Topology) -> list[Problem]:
    own = parse_cpus(topology.own_cpus)
    if own is None:
        return []
    far = []
    for device in topology.devices:
        near = parse_cpus(device.cpus)
        if near and not own & near:
            far.append(device)
    if not far:
        return []
    names = ", ".join(str(device.index) for device in far)
    return [
        Problem(
            "far_cpus",
            f"GPU {names} is far from processors {topology.own_cpus}, the only ones that ranks may use",
            f"allow its own: taskset -c {far[0].cpus} llmtop run ..., or numactl --cpunodebind",
        )
    ]


def parse_cpus(text: str | None) -> frozenset[int] | None:
    """Of `0-3,8`; None for None, and for what no kernel writes: a record may say anything."""
    if text is None:
        return None
    found: set[int] = set()
    told = 0
    for part in text.split(",") if text else ():
        match = _CPUS.fullmatch(part)
        if match is None:
            return None
        low, high = match.groups()
        named = range(int(low), int(high or low) + 1)
        told += len(named)
        if told > _MOST_CPUS:
            return None
        found.update(named)
    return frozenset(found)
