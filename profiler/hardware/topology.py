"""Read how GPUs are connected: PCIe and NVLink roads between each two, NUMA nodes, processors near them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from llmtop.profiler.hardware.gpm import gpm_supported
from llmtop.profiler.hardware.links import LinkReader
from llmtop.profiler.hardware.nvmlcalls import NvmlCalls, scaled, text
from llmtop.profiler.record.deviceevents import Topology, TopologyDevice, TopologyPair

_ANCESTORS: dict[int, str] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t in the letters of nvidia-smi."""
_PEERS: dict[int, str] = {0: "gpu", 2: "switch"}
_P2P_READ, _P2P_NVLINK = 0, 2
"""As numbers: the binding's name for the first one is a tuple by mistake."""
_P2P_OK = 0
_LINK_SPEED = 164
"""NVML_FI_DEV_NVLINK_GET_SPEED, in MB/s, its scope the link."""
_SLOWDOWN_THRESHOLD = 1
"""NVML_TEMPERATURE_THRESHOLD_SLOWDOWN."""
_CPU_WORDS = 32
"""Of 64 processors each."""


def read_topology(
    calls: NvmlCalls,
    handles: Sequence[tuple[int, Any]],
    names: Mapping[int, str | None],
    *,
    sysfs: Path = Path("/sys"),
) -> Topology:
    """`handles` are the devices by NVML index."""
    found = [_Found(calls, index, handle) for index, handle in handles]
    return Topology(
        devices=tuple(_device(calls, each, names.get(each.index), sysfs) for each in found),
        pairs=tuple(_pair(calls, first, second) for first, second in combinations(found, 2)),
        own_cpus=_own_cpus(),
    )


class _Found:
    """A device with what both its own row and its pairs need."""

    def __init__(self, calls: NvmlCalls, index: int, handle: Any) -> None:
        self.index, self.handle = index, handle
        pci = calls.ask("nvmlDeviceGetPciInfo", handle)
        self.bus_id = None if pci is None else text(pci.busId)
        self.links = LinkReader(calls, handle, lambda: 0.0).active()
        kinds = {
            calls.number("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) for link in self.links or ()
        }
        peers = {None if kind is None else _PEERS.get(kind) for kind in kinds}
        self.peer = peers.pop() if len(peers) == 1 else None

    def links_to(self, calls: NvmlCalls, bus_id: str | None) -> int:
        """Links whose other end is that device itself."""
        ends = [calls.ask("nvmlDeviceGetNvLinkRemotePciInfo", self.handle, link) for link in self.links or ()]
        return sum(end is not None and bus_id is not None and text(end.busId) == bus_id for end in ends)


def _device(calls: NvmlCalls, found: _Found, name: str | None, sysfs: Path) -> TopologyDevice:
    handle = found.handle
    ecc, mig = calls.ask("nvmlDeviceGetEccMode", handle), calls.ask("nvmlDeviceGetMigMode", handle)
    return TopologyDevice(
        index=found.index,
        name=name,
        pci_bus_id=found.bus_id,
        numa_node=_numa_node(calls, handle, found.bus_id, sysfs),
        cpus=_near_cpus(calls, handle),
        pcie_generation=calls.number("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_generation_max=calls.number("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=calls.number("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_width_max=calls.number("nvmlDeviceGetMaxPcieLinkWidth", handle),
        nvlinks=None if found.links is None else len(found.links),
        nvlink_peer=found.peer,
        nvlink_bytes_per_second=_link_speed(calls, found),
        has_gpm=gpm_supported(calls, handle),
        slowdown_celsius=scaled(
            calls.ask("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN_THRESHOLD), 1.0
        ),
        ecc_enabled=None if ecc is None else bool(ecc[0]),
        mig_enabled=None if mig is None else bool(mig[0]),
    )


def _pair(calls: NvmlCalls, first: _Found, second: _Found) -> TopologyPair:
    nvlinks = _nvlinks_between(calls, first, second)
    ancestor = calls.number("nvmlDeviceGetTopologyCommonAncestor", first.handle, second.handle)
    road = f"NV{nvlinks}" if nvlinks else None if ancestor is None else _ANCESTORS.get(ancestor)
    peer = calls.number("nvmlDeviceGetP2PStatus", first.handle, second.handle, _P2P_READ)
    return TopologyPair(
        first=min(first.index, second.index),
        second=max(first.index, second.index),
        road=road,
        nvlinks=nvlinks,
        peer_access=None if peer is None else peer == _P2P_OK,
    )


def _nvlinks_between(calls: NvmlCalls, first: _Found, second: _Found) -> int | None:
    if first.links is None or second.links is None:
        return None
    direct = first.links_to(calls, second.bus_id)
    if direct:
        return direct
    # Through switches every link serves every other device of the fabric.
    status = calls.number("nvmlDeviceGetP2PStatus", first.handle, second.handle, _P2P_NVLINK)
    if status is None:
        return None
    return min(len(first.links), len(second.links)) if status == _P2P_OK else 0


def _link_speed(calls: NvmlCalls, found: _Found) -> float | None:
    speeds = calls.fields(found.handle, [(_LINK_SPEED, link) for link in found.links or ()])
    known = [speed.value for speed in speeds if speed.value is not None]
    return sum(known) * 1e6 if known and len(known) == len(speeds) else None


def _numa_node(calls: NvmlCalls, handle: Any, bus_id: str | None, sysfs: Path) -> int | None:
    """From the kernel, which knows it of every PCI device; NVML tells it only of memory of its own kind."""
    if bus_id is not None:
        domain, _, rest = bus_id.lower().partition(":")
        try:
            path = sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}" / "numa_node"
            node = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            return node
    return calls.number("nvmlDeviceGetNumaNodeId", handle)


def _near_cpus(calls: NvmlCalls, handle: Any) -> str | None:
    words = calls.ask("nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS)
    if words is None:
        return None
    near = [64 * place + bit for place, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1]
    return cpu_ranges(near) or None


def _own_cpus() -> str | None:
    try:
        return cpu_ranges(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def cpu_ranges(cpus: Iterable[int]) -> str:
    """`0-3,8`, as the kernel writes sets of processors."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
