"""Findings about the GPUs themselves: errors that the driver reports, memory, heat, links."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.profiler import topology
from llmtop.profiler.findings.finding import Finding, Rule, Seen
from llmtop.profiler.fold.ending import memory_words
from llmtop.profiler.hardware.aside import WAIT_SECONDS
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.units import counted

NEAR_SLOWDOWN_CELSIUS = 3.0
"""A device this near to the temperature at which it slows down is hot."""
HOT_SHARE = 0.10
_SEVERAL_SAMPLES = 3

_TITLES: dict[str, str] = {
    "no_nvlink": "GPUs without NVLink between them",
    "no_peer_access": "GPUs cannot reach each other",
    "narrow_pcie": "a GPU uses few PCIe lanes",
    "far_cpus": "ranks run far from their GPU",
}


def lost_devices(seen: Seen) -> Iterator[Finding]:
    gone = sorted(seen.state.lost_devices)
    if gone:
        names = ", ".join(map(str, gone))
        yield Finding(
            key="gpu_lost",
            severity="critical",
            title=f"GPU {names} is lost",
            evidence="the driver says that the device is gone or has to be reset",
            change="see dmesg for NVRM: Xid; restart the machine; have seat and power of the GPU looked at",
        )


def silent_driver(seen: Seen) -> Iterator[Finding]:
    sample = seen.state.hardware
    if sample is not None and sample.driver_silent:
        yield Finding(
            key="driver_silent",
            severity="critical",
            title="the driver of the GPUs does not answer",
            evidence=f"it was asked for readings and has not come back for {WAIT_SECONDS:g} s or more",
            change="see dmesg for NVRM; where nvidia-smi hangs too, the machine has to be restarted: save if"
            f" the training goes on (llmtop stop {seen.state.called} --save)",
        )


def memory_kept(seen: Seen) -> Iterator[Finding]:
    """Of a run that has ended: GPUs that did not get their memory back."""
    returned = seen.state.memory_returned
    kept = [device for device in returned.devices if device.is_back is False] if returned else []
    if kept:
        names = ", ".join(str(device.index) for device in kept)
        yield Finding(
            key="memory_kept",
            severity="warning",
            title=f"GPU {names} did not get its memory back",
            evidence=memory_words(seen.state),
            change="nvidia-smi lists who has it; another program may have begun there meanwhile",
        )


def xids(seen: Seen) -> Iterator[Finding]:
    for event in seen.state.xids:
        count = seen.state.xid_counts.get(event.device, 0)
        others = [e.xid for e in seen.state.xids if e.device == event.device and e is not event]
        also = f"; also {', '.join(map(str, others))}" if others else ""
        yield Finding(
            key="xid",
            severity="critical",
            title=f"Xid {event.xid} on GPU {event.device}",
            evidence=f"{event.meaning}; {counted(count, 'Xid error')} of this GPU so far{also}",
            change=event.fix,
        )


def memory_errors(seen: Seen) -> Iterator[Finding]:
    """Totals count since the driver was loaded, so new errors are those above the run's first reading."""
    sample = seen.state.hardware
    for device in sample.devices if sample else ():
        name = f"GPU {device.index}"
        if device.ecc_uncorrected:
            new = device.ecc_uncorrected - seen.state.first_ecc_uncorrected[device.index]
            yield Finding(
                key="ecc_uncorrected",
                severity="critical" if new > 0 else "warning",
                title=f"{name} has memory errors",
                evidence=f"{counted(device.ecc_uncorrected, 'error')} that ECC could not correct since the "
                f"driver was loaded, {max(new, 0)} of them during this run",
                change="reset the device when the run is over; results of the run are in doubt if it went on",
            )
        if device.remap_failed:
            yield Finding(
                key="remap_failed",
                severity="critical",
                title=f"{name} cannot replace bad memory",
                evidence="replacing a memory row failed; spare rows are used up or broken",
                change="have the device replaced",
            )
        elif device.remap_pending or device.retirement_pending:
            yield Finding(
                key="remap_pending",
                severity="warning",
                title=f"{name} waits for a reset",
                evidence="bad memory is to be replaced at the next reset of the device",
                change="reset the device when the run is over: nvidia-smi --gpu-reset",
            )


def hot(seen: Seen) -> Iterator[Finding]:
    """Only where the driver tells at which temperature a device slows down."""
    devices = seen.state.topology.devices if seen.state.topology else ()
    limits = {d.index: d.slowdown_celsius for d in devices if d.slowdown_celsius is not None}
    readings: dict[int, list[float]] = {}
    for sample in seen.state.hardware_history:
        for device in sample.devices:
            if device.temperature_celsius is not None and device.index in limits:
                readings.setdefault(device.index, []).append(device.temperature_celsius)
    for index, degrees in sorted(readings.items()):
        over = [value for value in degrees if value >= limits[index] - NEAR_SLOWDOWN_CELSIUS]
        if len(over) >= _SEVERAL_SAMPLES and len(over) >= HOT_SHARE * len(degrees):
            yield Finding(
                key="gpu_hot",
                severity="warning",
                title=f"GPU {index} is hot",
                evidence=f"{max(over):.0f} C, and near the {limits[index]:.0f} C at which it slows down in "
                f"{len(over)} of {len(degrees)} samples",
                change="look at fans, filters and what stands before the inlets; a lower power limit helps",
            )


def link_errors(seen: Seen) -> Iterator[Finding]:
    """Those of the last minutes. What a replay repeats is not lost, but takes time."""
    history = seen.state.hardware_history
    first: dict[tuple[int, int], int] = {}
    told: set[int] = set()
    for sample in history:
        for device in sample.devices:
            if device.links and device.index not in told:
                told.add(device.index)
                first |= _link_totals(device)
    newest: dict[tuple[int, int], int] = {}
    for sample in reversed(history):
        # A link that went down is in older samples only; as a rule the newest has all.
        if first.keys() <= newest.keys():
            break
        for device in sample.devices:
            newest = _link_totals(device) | newest
    grown = {key: newest[key] - total for key, total in first.items() if newest[key] > total}
    if grown:
        named = ", ".join(f"GPU {gpu} link {link}: {n}" for (gpu, link), n in sorted(grown.items())[:4])
        yield Finding(
            key="nvlink_errors",
            severity="warning",
            title="NVLink errors",
            evidence=f"CRC errors, replays and recoveries in the last minutes: {named}",
            change="nvidia-smi nvlink --errorcounters; if they go on, have bridge or baseboard looked at",
        )


def _link_totals(device: DeviceSample) -> dict[tuple[int, int], int]:
    """Device and link to all its errors since the driver was loaded."""
    return {
        (device.index, link.link): sum(filter(None, (link.crc_errors, link.replays, link.recoveries)))
        for link in device.links
    }


def slow_roads(seen: Seen) -> Iterator[Finding]:
    if seen.state.topology is None:
        return
    for problem in topology.problems(seen.state.topology):
        yield Finding(
            key=problem.key,
            severity="info",
            title=_TITLES[problem.key],
            evidence=problem.what,
            change=problem.fix,
        )


DEVICE_RULES: tuple[Rule, ...] = (
    lost_devices,
    silent_driver,
    xids,
    memory_errors,
    memory_kept,
    hot,
    link_errors,
    slow_roads,
)
