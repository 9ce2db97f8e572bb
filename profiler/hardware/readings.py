"""The readings of one GPU as a table: the NVML call of each, what it gives, and which clock it is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llmtop.profiler.hardware.gpm import GpmReader
from llmtop.profiler.hardware.links import LinkReader
from llmtop.profiler.hardware.nvmlcalls import NvmlCalls, scaled

_THROTTLES: tuple[tuple[int, str], ...] = (
    (0x2, "clocks set by a person"),
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
    (0x100, "display clock"),
)
"""Bits of the clock event reasons (nvml.h); idle is not a throttle."""

_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_RETIRED_FOR_MANY_SINGLE, _RETIRED_FOR_DOUBLE = 0, 1


class Device:
    """One GPU and what has to be kept between its readings."""

    def __init__(self, index: int, handle: Any, calls: NvmlCalls, clock: Callable[[], float]) -> None:
        self.index, self.handle, self.calls = index, handle, calls
        self.links = LinkReader(calls, handle, clock)
        self.gpm = GpmReader(calls, handle, clock)

    def ask(self, name: str, *arguments: Any) -> Any:
        return self.calls.ask(name, self.handle, *arguments)

    def number(self, name: str, *arguments: Any) -> int | None:
        return self.calls.number(name, self.handle, *arguments)


class Reading(NamedTuple):
    call: str
    """The NVML function, with what tells it from another use of the same."""
    read: Callable[[Device], dict[str, Any]]
    """Fields of a device sample."""
    always_slow: bool = False
    """On the slow clock whatever it costs, because it seldom changes or fills many bytes of the record."""


def _memory(device: Device) -> dict[str, Any]:
    memory = device.ask("nvmlDeviceGetMemoryInfo")
    return {"memory_used_bytes": None if memory is None else int(memory.used)}


def _utilization(device: Device) -> dict[str, Any]:
    rates = device.ask("nvmlDeviceGetUtilizationRates")
    return {"utilization_percent": None if rates is None else float(rates.gpu)}


def _scaled(call: str, field: str, factor: float, *arguments: int) -> Callable[[Device], dict[str, Any]]:
    """One number of one call in the unit of the field."""

    def read(device: Device) -> dict[str, Any]:
        return {field: scaled(device.ask(call, *arguments), factor)}

    return read


def _count(call: str, field: str, *arguments: int) -> Callable[[Device], dict[str, Any]]:
    def read(device: Device) -> dict[str, Any]:
        return {field: device.number(call, *arguments)}

    return read


def _throttles(device: Device) -> dict[str, Any]:
    bits = device.number("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        bits = device.number("nvmlDeviceGetCurrentClocksThrottleReasons")
    reasons = None if bits is None else tuple(name for bit, name in _THROTTLES if bits & bit)
    return {"throttle_reasons": reasons}


def _remapped(device: Device) -> dict[str, Any]:
    rows = device.ask("nvmlDeviceGetRemappedRows")
    if rows is None:
        return {}
    corrected, uncorrected, pending, failed = rows
    return {
        "remapped_rows": int(corrected) + int(uncorrected),
        "remap_pending": bool(pending),
        "remap_failed": bool(failed),
    }


def _retired(device: Device) -> dict[str, Any]:
    causes = (_RETIRED_FOR_MANY_SINGLE, _RETIRED_FOR_DOUBLE)
    pages = [device.ask("nvmlDeviceGetRetiredPages", cause) for cause in causes]
    pending = device.number("nvmlDeviceGetRetiredPagesPendingStatus")
    return {
        "retired_pages": None if None in pages else sum(len(of_cause) for of_cause in pages),
        "retirement_pending": None if pending is None else bool(pending),
    }


READINGS: tuple[Reading, ...] = (
    Reading("nvmlDeviceGetMemoryInfo", _memory),
    Reading("nvmlDeviceGetUtilizationRates", _utilization),
    Reading("nvmlDeviceGetPowerUsage", _scaled("nvmlDeviceGetPowerUsage", "power_watts", 1e-3)),
    Reading(
        "nvmlDeviceGetEnforcedPowerLimit",
        _scaled("nvmlDeviceGetEnforcedPowerLimit", "power_limit_watts", 1e-3),
    ),
    Reading("nvmlDeviceGetTemperature", _scaled("nvmlDeviceGetTemperature", "temperature_celsius", 1.0, 0)),
    Reading("nvmlDeviceGetClockInfo SM", _scaled("nvmlDeviceGetClockInfo", "sm_clock_hz", 1e6, _CLOCK_SM)),
    Reading(
        "nvmlDeviceGetClockInfo memory",
        _scaled("nvmlDeviceGetClockInfo", "memory_clock_hz", 1e6, _CLOCK_MEMORY),
    ),
    Reading("nvmlDeviceGetCurrentClocksEventReasons", _throttles),
    Reading("nvmlDeviceGetFieldValues NVLink", lambda device: device.links.nvlink_rates()),
    Reading("nvmlDeviceGetFieldValues PCIe", lambda device: device.links.pcie_rates()),
    Reading("nvmlGpmMetricsGet", lambda device: device.gpm.read()),
    Reading(
        "nvmlDeviceGetTotalEnergyConsumption",
        _scaled("nvmlDeviceGetTotalEnergyConsumption", "energy_joules", 1e-3),
    ),
    Reading(
        "nvmlDeviceGetTotalEccErrors corrected",
        _count("nvmlDeviceGetTotalEccErrors", "ecc_corrected", _CORRECTED, _VOLATILE),
        always_slow=True,
    ),
    Reading(
        "nvmlDeviceGetTotalEccErrors uncorrected",
        _count("nvmlDeviceGetTotalEccErrors", "ecc_uncorrected", _UNCORRECTED, _VOLATILE),
        always_slow=True,
    ),
    Reading("nvmlDeviceGetRemappedRows", _remapped, always_slow=True),
    Reading("nvmlDeviceGetRetiredPages", _retired, always_slow=True),
    Reading(
        "nvmlDeviceGetCurrPcieLinkGeneration",
        _count("nvmlDeviceGetCurrPcieLinkGeneration", "pcie_generation"),
        always_slow=True,
    ),
    Reading(
        "nvmlDeviceGetCurrPcieLinkWidth",
        _count("nvmlDeviceGetCurrPcieLinkWidth", "pcie_width"),
        always_slow=True,
    ),
    Reading(
        "nvmlDeviceGetPcieReplayCounter",
        _count("nvmlDeviceGetPcieReplayCounter", "pcie_replays"),
        always_slow=True,
    ),
    Reading("nvmlDeviceGetFieldValues each NVLink", lambda device: device.links.each(), always_slow=True),
)
"""Later readings do not replace what earlier ones gave: GPM's link rates stand in where counters lack."""


def with_fallbacks(fields: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the fields of one more reading, where an earlier one knows nothing."""
    for name, value in more.items():
        if fields.get(name) is None:
            fields[name] = value
