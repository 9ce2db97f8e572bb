"""Read NVIDIA GPUs through NVML. What the driver does not tell is None; no reading ever raises.

Link counters are running totals; rates are their differences between two samples. PCIe comes from the
byte-count fields, because `nvmlDeviceGetPcieThroughput` takes 20 ms a call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from msgspec import Struct

from llmtop.profiler.events import DeviceSample
from llmtop.profiler.hardware.counters import RateCounter

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field value: the sum over all NVLinks; without it only link 0 is counted."""
_KIB = 1024

_FIELDS: tuple[tuple[str, str, int | None, int], ...] = (
    ("nvlink_tx", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", ALL_LINKS, _KIB),
    ("nvlink_rx", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", ALL_LINKS, _KIB),
    ("pcie_tx", "NVML_FI_DEV_PCIE_COUNT_TX_BYTES", None, 1),
    ("pcie_rx", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES", None, 1),
)
"""Counter, NVML field, scope, bytes a count."""

_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of NVML's value union in the order of its value types."""

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


class NvmlDevice(Struct, frozen=True, kw_only=True):
    """What does not change while the program runs."""

    index: int
    name: str | None
    uuid: str | None
    memory_total_bytes: int | None
    compute_capability: str | None = None
    """As `9.0`."""


class NvmlReader:
    """The GPUs of this machine. Without a driver there are none, and `problem` says why."""

    def __init__(
        self, pynvml: ModuleType | Any | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problem: str | None = None
        """Why there are no devices; None when NVML works."""
        self.devices: tuple[NvmlDevice, ...] = ()
        self._clock = clock
        self._handles: list[Any] = []
        self._rates: dict[tuple[int, str], RateCounter] = {}
        self._unsupported: set[tuple[int, str]] = set()
        try:
            self._nvml = pynvml if pynvml is not None else import_module("pynvml")
        except ImportError as error:
            self.problem = f"nvidia-ml-py cannot be imported: {error}"
            return
        try:
            self._nvml.nvmlInit()
            count = int(self._nvml.nvmlDeviceGetCount())
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except self._nvml.NVMLError as error:
            self.problem = f"NVML: {error}"
            self._handles = []
            return
        self.devices = tuple(self._describe(index) for index in range(count))

    def sample(
        self, indices: Iterable[int] | None = None, *, own_pids: Collection[int] | None = None
    ) -> tuple[DeviceSample, ...]:
        """Read the devices, all or those of `indices`, in that order.

        With `own_pids` the processes of each device are listed too, which costs more than the rest.
        """
        chosen = range(len(self._handles)) if indices is None else indices
        return tuple(self._sample(index, own_pids) for index in chosen if index < len(self._handles))

    def visible_indices(self) -> tuple[int, ...]:
        """NVML indices of the devices that CUDA shows to this process, in CUDA's order."""
        return visible_device_indices([device.uuid for device in self.devices])

    def close(self) -> None:
        if self._handles:
            self._ask("nvmlShutdown")
            self._handles = []

    def _describe(self, index: int) -> NvmlDevice:
        handle = self._handles[index]
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        return NvmlDevice(
            index=index,
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)),
            memory_total_bytes=None if memory is None else int(memory.total),
            compute_capability=None if capability is None else ".".join(map(str, capability)),
        )

    def _sample(self, index: int, own_pids: Collection[int] | None) -> DeviceSample:
        handle, nvml = self._handles[index], self._nvml
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        utilization = self._ask("nvmlDeviceGetUtilizationRates", handle)
        process_count, own_memory = self._processes(handle, own_pids)
        rates = self._link_rates(index)
        return DeviceSample(
            index=index,
            name=self.devices[index].name,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=self.devices[index].memory_total_bytes,
            own_memory_bytes=own_memory,
            utilization_percent=None if utilization is None else float(utilization.gpu),
            power_watts=_scaled(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            power_limit_watts=_scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            temperature_celsius=_scaled(
                self._ask("nvmlDeviceGetTemperature", handle, getattr(nvml, "NVML_TEMPERATURE_GPU", 0)), 1.0
            ),
            sm_clock_hz=_scaled(
                self._ask("nvmlDeviceGetClockInfo", handle, getattr(nvml, "NVML_CLOCK_SM", 1)), 1e6
            ),
            memory_clock_hz=_scaled(
                self._ask("nvmlDeviceGetClockInfo", handle, getattr(nvml, "NVML_CLOCK_MEM", 2)), 1e6
            ),
            throttle_reasons=self._throttles(handle),
            nvlink_tx_bytes_per_second=rates.get("nvlink_tx"),
            nvlink_rx_bytes_per_second=rates.get("nvlink_rx"),
            pcie_tx_bytes_per_second=rates.get("pcie_tx"),
            pcie_rx_bytes_per_second=rates.get("pcie_rx"),
            process_count=process_count,
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """One NVML call; None when this driver, device or binding does not answer."""
        call = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    def _throttles(self, handle: Any) -> tuple[str, ...] | None:
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if bits is None else tuple(name for bit, name in _THROTTLES if int(bits) & bit)

    def _processes(self, handle: Any, own_pids: Collection[int] | None) -> tuple[int | None, int | None]:
        """How many there are, and what ours hold. In a container NVML may number them as the host does."""
        found = None if own_pids is None else self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if found is None or own_pids is None:
            return None, None
        own = [process.usedGpuMemory for process in found if process.pid in own_pids]
        known = own and all(size is not None for size in own)
        return len(found), sum(map(int, own)) if known else None

    def _link_rates(self, index: int) -> dict[str, float | None]:
        wanted: list[tuple[str, int, int]] = []
        requests: list[Any] = []
        for counter, field, scope, scale in _FIELDS:
            number = getattr(self._nvml, field, None)
            if number is None or (index, counter) in self._unsupported:
                continue
            wanted.append((counter, scale, number))
            requests.append(number if scope is None else (number, scope))
        values = self._ask("nvmlDeviceGetFieldValues", self._handles[index], requests) if requests else None
        if values is None:
            return {}
        now = self._clock()
        rates: dict[str, float | None] = {}
        for (counter, scale, _), value in zip(wanted, values, strict=True):
            total = self._field_total(index, counter, value)
            rate = self._rates.setdefault((index, counter), RateCounter())
            rates[counter] = rate.advance(None if total is None else total * scale, now)
        return rates

    def _field_total(self, index: int, counter: str, value: Any) -> float | None:
        if value.nvmlReturn == 0 and 0 <= value.valueType < len(_VALUE_MEMBERS):
            return float(getattr(value.value, _VALUE_MEMBERS[value.valueType]))
        if value.nvmlReturn == getattr(self._nvml, "NVML_ERROR_NOT_SUPPORTED", 3):
            # It never will be: asking again would cost time at every sample.
            self._unsupported.add((index, counter))
        return None


def visible_device_indices(uuids: Sequence[str | None], visible: str | None = None) -> tuple[int, ...]:
    """NVML indices of the devices that CUDA enumerates, in its order; position is the local rank.

    `uuids` are the machine's, by NVML index; `visible` is CUDA_VISIBLE_DEVICES (default: of this
    process). Like CUDA, the list ends before its first entry that names no device.
    """
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        index = _device_named(entry, uuids)
        if index is None or index in found:
            break
        found.append(index)
    return tuple(found)


def _device_named(entry: str, uuids: Sequence[str | None]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith(("GPU-", "MIG-GPU-")):
        return None
    # CUDA accepts a unique beginning; the old MIG form is MIG-GPU-uuid/instance/compute.
    prefix = entry.removeprefix("MIG-").partition("/")[0]
    hits = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(prefix)]
    return hits[0] if len(hits) == 1 else None


def _text(value: Any) -> str | None:
    """Older bindings give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _scaled(value: Any, factor: float) -> float | None:
    return None if value is None else float(value) * factor
