"""Checks of the GPUs: how they are connected, whether their memory is sound, what can be measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from llmtop.profiler import topology
from llmtop.profiler.hardware.aside import ask_once
from llmtop.profiler.hardware.costs import FAST_SECONDS, CallCost
from llmtop.profiler.hardware.gpm import SHORTEST_SECONDS
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.record.deviceevents import DeviceSample, Topology
from llmtop.profiler.units import counted, format_seconds
from llmtop.tui.commands.output import table
from llmtop.tui.doctor.check import UNANSWERED, Check

_SAMPLES = 4
"""The first one warms up, activity begins with the second, and a cost is known from two more."""


class GpuLook(Struct, frozen=True, kw_only=True):
    """What the machine's GPUs are and how they are connected."""

    topology: Topology = Topology()
    call_costs: tuple[CallCost, ...] = ()
    """What each reading of each device takes; a slow one is not read at every sample."""
    checks: tuple[Check, ...] = ()


def look_at_gpus(reader: NvmlReader | None = None, pause: Callable[[float], None] = time.sleep) -> GpuLook:
    """All devices of the machine; nothing where no driver answers. Takes half a second with a GPU."""
    hangs = Check(
        name="gpu readings",
        status="warn",
        found="the NVIDIA driver does not answer all that it is asked",
        mend=UNANSWERED,
    )
    return ask_once(lambda: _looked(reader, pause), GpuLook(checks=(hangs,)))


def _looked(reader: NvmlReader | None, pause: Callable[[float], None]) -> GpuLook:
    nvml = reader if reader is not None else NvmlReader()
    try:
        if not nvml.devices:
            return GpuLook()
        told = nvml.watch_xids()
        samples: tuple[DeviceSample, ...] = ()
        for number in range(_SAMPLES):
            if number:
                pause(1.2 * SHORTEST_SECONDS)
            samples = nvml.sample()
        described, costs = nvml.topology(), nvml.call_costs()
    finally:
        nvml.close()
    checks = (*_links(described), *_memory(samples), _activity(samples), _xids(samples, told), _costs(costs))
    return GpuLook(topology=described, call_costs=costs, checks=checks)


def matrix_lines(described: Topology) -> Iterator[str]:
    """As `nvidia-smi topo -m` prints it, and what the letters mean."""
    yield from table(topology.matrix(described))
    yield from (f"{road}: {words}" for road, words in topology.legend(described))


def _links(described: Topology) -> Iterator[Check]:
    found = topology.problems(described)
    for problem in found:
        yield Check(name="gpu links", status="warn", found=problem.what, mend=problem.fix)
    if not found:
        words = {topology.nvlink_words(device) for device in described.devices}
        lanes = {topology.pcie_words(d.pcie_generation_max, d.pcie_width_max) for d in described.devices}
        yield Check(
            name="gpu links",
            status="ok",
            found=f"NVLink {' and '.join(sorted(words))}; PCIe {' and '.join(sorted(lanes))}",
        )


def _memory(samples: Sequence[DeviceSample]) -> Iterator[Check]:
    name = "gpu memory"
    sound = True
    for device in samples:
        what = _memory_trouble(device)
        if what:
            sound = False
            yield Check(name=name, status="warn", found=f"GPU {device.index} {what[0]}", mend=what[1])
    if sound:
        is_told = all(device.ecc_uncorrected is not None for device in samples)
        told = "no error that ECC could not correct" if is_told else "ECC errors: n/a"
        yield Check(name=name, status="ok", found=told)


def _memory_trouble(device: DeviceSample) -> tuple[str, str] | None:
    """What is wrong, and what to do."""
    if device.is_lost:
        return "is lost", "see dmesg for NVRM: Xid; restart the machine"
    if device.remap_failed:
        return "could not replace a bad memory row", "have the device replaced"
    if device.remap_pending or device.retirement_pending:
        return "waits for a reset that replaces bad memory", "nvidia-smi --gpu-reset while nobody uses it"
    if device.ecc_uncorrected:
        errors = counted(device.ecc_uncorrected, "memory error")
        return f"had {errors} since the driver was loaded", "test it: dcgmi diag -r 3"
    return None


def _activity(samples: Sequence[DeviceSample]) -> Check:
    without = [str(device.index) for device in samples if device.sm_active_percent is None]
    if not without:
        return Check(name="gpu activity", status="ok", found="SM, tensor and DRAM activity by GPM")
    return Check(
        name="gpu activity",
        status="optional",
        found=f"GPU {', '.join(without)} gives no GPM: only NVML's utilisation, whether any kernel runs",
        mend="none: GPM begins with Hopper, and is not given in MIG mode and in some virtual machines",
    )


def _xids(samples: Sequence[DeviceSample], told: frozenset[int]) -> Check:
    silent = [str(device.index) for device in samples if device.index not in told]
    if not silent:
        return Check(name="gpu errors", status="ok", found="the driver tells Xid errors as they come")
    return Check(
        name="gpu errors",
        status="optional",
        found=f"the driver does not tell Xid errors of GPU {', '.join(silent)} here",
        mend="dmesg on the host shows them (NVRM: Xid)",
    )


def _costs(costs: Sequence[CallCost]) -> Check:
    """Those that leave the fast clock for what they take, not for what they are."""
    slow: dict[str, float] = {}
    for row in costs:
        if row.seconds is not None and row.seconds > FAST_SECONDS:
            slow[row.call] = max(slow.get(row.call, 0.0), row.seconds)
    if not slow:
        return Check(name="gpu readings", status="ok", found="none takes more than a millisecond")
    named = ", ".join(f"{call} {format_seconds(seconds)}" for call, seconds in slow.items())
    return Check(name="gpu readings", status="ok", found=f"on the slow clock, because they are dear: {named}")
