"""A stand-in for the `pynvml` module: GPUs whose readings, failures and costs a test sets.

Errors, constants and structs are the real binding's, so that what is written against this one finds the
same names, members and exceptions on a machine with a driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1024**3
ALL_LINKS = 0xFFFFFFFF
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST
TIMEOUT = pynvml.NVML_ERROR_TIMEOUT
_UNSIGNED_LONG_LONG = 3
"""Value type of 64-bit counters."""
NVMLError: type[Exception] = pynvml.NVMLError


class FakeGpu:
    def __init__(self, name: str = "NVIDIA H200", uuid: str = "GPU-aaaa", total: int = 140 * GIB) -> None:
        self.name: str | bytes = name
        self.uuid = uuid
        self.total = total
        self.used = 10 * GIB
        self.throttle_bits = 0
        self.fields: dict[int, int] = {138: 0, 139: 0, 197: 0, 198: 0}
        """Field to its running total (NVLink: of all links); a field that is absent is not supported."""
        self.link_fields: dict[tuple[int, int], int] = {}
        """(Field, link) to its value."""
        self.processes: list[Any] = []
        self.lost = False
        self.broken: dict[str, int] = {}
        """NVML function to the error code that it answers with."""
        self.gpm: dict[int, float] | None = None
        """Metric to what the next two samples will show; None: no GPM."""
        self.energy_mj: int | None = None
        self.ecc: dict[int, int] | None = None
        """Error type (0 corrected, 1 uncorrected) to its count."""
        self.remapped: tuple[int, int, int, int] | None = None
        self.retired: dict[int, int] | None = None
        """Cause to pages."""
        self.retirement_pending = False
        self.xids: list[int] = []
        """Waiting for whoever has registered."""
        self.pcie = {"gen": 5, "gen_max": 5, "width": 16, "width_max": 16}
        self.links: list[int] = []
        """State of each NVLink."""
        self.missing_links: set[int] = set()
        """Of these, the ones that are not there."""
        self.link_peer = 2
        self.link_bus_ids: dict[int, str] = {}
        """Link to the bus id of what is at its other end."""
        self.bus_id = "00000000:1B:00.0"
        self.cpus: frozenset[int] = frozenset(range(4))
        self.road = 50
        """Common ancestor with any other device."""
        self.peer_to_peer = 0
        """Status of every kind of peer-to-peer access; 0 is well."""


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class EventSet:
    """What nvmlEventSetCreate gives."""

    def __init__(self) -> None:
        self.gpus: list[FakeGpu] = []


class FakeNvml:
    """Behaves like the module: functions by name, error classes, constants, structs."""

    def __init__(self, *gpus: FakeGpu, init_error: int | None = None) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.calls: list[str] = []
        self.requested: list[list[Any]] = []
        self.open_handles: list[Any] = []
        """Event sets and GPM buffers that nobody has freed."""
        self._addresses = 4096
        self.spend: Callable[[str], None] = lambda name: None
        """Called with each function's name: here a test's clock goes on."""

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.calls.append("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def __getattr__(self, name: str) -> Any:
        """A function of a device, or else what the real module has by this name."""
        answer = _ANSWERS.get(name)
        if answer is None:
            if name.startswith("nvml") and callable(getattr(pynvml, name)) and name in _MODELLED:
                raise AttributeError(name)
            real = getattr(pynvml, name)
            return self._refusal(name) if name.startswith("nvml") and callable(real) else real

        def call(gpu: FakeGpu, *arguments: Any) -> Any:
            self._begin(name, gpu)
            return answer(gpu, *arguments)

        return call

    def _refusal(self, name: str) -> Callable[..., Any]:
        def refuse(*_arguments: Any) -> Any:
            self.calls.append(name)
            raise pynvml.NVMLError(NOT_SUPPORTED)

        return refuse

    def _begin(self, name: str, gpu: FakeGpu) -> None:
        self.calls.append(name)
        self.spend(name)
        if gpu.lost:
            raise pynvml.NVMLError(GPU_IS_LOST)
        if name in gpu.broken:
            raise pynvml.NVMLError(gpu.broken[name])

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, requests: list[Any]) -> Any:
        self.requested.append(requests)
        self._begin("nvmlDeviceGetFieldValues", gpu)
        values = (pynvml.c_nvmlFieldValue_t * len(requests))()
        for value, request in zip(values, requests, strict=True):
            _fill(gpu, value, *(request if isinstance(request, tuple) else (request, 0)))
        return values

    # --- GPM ----------------------------------------------------------------------------------------

    def nvmlGpmSampleAlloc(self) -> Any:
        # An address that nothing reads, so that the pointers differ.
        self._addresses += 16
        buffer = ctypes.cast(self._addresses, pynvml.c_nvmlGpmSample_t)
        self.open_handles.append(buffer)
        return buffer

    def nvmlGpmSampleFree(self, buffer: Any) -> None:
        self.open_handles.remove(buffer)

    def nvmlGpmSampleGet(self, gpu: FakeGpu, buffer: Any) -> Any:
        self._begin("nvmlGpmSampleGet", gpu)
        buffer.filled = dict(gpu.gpm or {})
        return buffer

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        self.calls.append("nvmlGpmMetricsGet")
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        _, newest = (
            next(each for each in self.open_handles if _same(each, sample) and hasattr(each, "filled"))
            for sample in (request.sample1, request.sample2)
        )
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in newest.filled else NOT_SUPPORTED
            metric.value = newest.filled.get(metric.metricId, 0.0)
        return request

    # --- events -------------------------------------------------------------------------------------

    def nvmlEventSetCreate(self) -> EventSet:
        events = EventSet()
        self.open_handles.append(events)
        return events

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: int, events: EventSet) -> None:
        self._begin("nvmlDeviceRegisterEvents", gpu)
        assert types == pynvml.nvmlEventTypeXidCriticalError
        events.gpus.append(gpu)

    def nvmlEventSetWait_v2(self, events: EventSet, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "nothing ever waits"
        self.calls.append("nvmlEventSetWait_v2")
        self.spend("nvmlEventSetWait_v2")
        for gpu in events.gpus:
            if gpu.xids:
                event = pynvml.c_nvmlEventData_t()
                event.eventType, event.eventData = pynvml.nvmlEventTypeXidCriticalError, gpu.xids.pop(0)
                return event
        raise pynvml.NVMLError(TIMEOUT)

    def nvmlEventSetFree(self, events: EventSet) -> None:
        self.open_handles.remove(events)


def _same(buffer: Any, pointer: Any) -> bool:
    if isinstance(buffer, EventSet):
        return False
    return ctypes.cast(buffer, ctypes.c_void_p).value == ctypes.cast(pointer, ctypes.c_void_p).value


def _fill(gpu: FakeGpu, value: Any, field: int, scope: int) -> None:
    value.fieldId, value.scopeId = field, scope
    found = gpu.link_fields.get((field, scope)) if scope != ALL_LINKS else None
    found = gpu.fields.get(field) if found is None and (scope in (0, ALL_LINKS)) else found
    if found is None:
        value.nvmlReturn = NOT_SUPPORTED
        return
    value.nvmlReturn, value.valueType = 0, _UNSIGNED_LONG_LONG
    value.value.ullVal = found


def _known(value: Any) -> Any:
    if value is None:
        raise pynvml.NVMLError(NOT_SUPPORTED)
    return value


def _remote(gpu: FakeGpu, link: int) -> Any:
    info = pynvml.nvmlPciInfo_t()
    info.busId = gpu.link_bus_ids.get(link, "00000000:00:00.0").encode()
    return info


def _own_pci(gpu: FakeGpu) -> Any:
    info = pynvml.nvmlPciInfo_t()
    info.busId = gpu.bus_id.encode()
    return info


def _link_state(gpu: FakeGpu, link: int) -> int:
    if link >= len(gpu.links) or link in gpu.missing_links:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT if gpu.links else NOT_SUPPORTED)
    return gpu.links[link]


def _peer_status(gpu: FakeGpu, other: FakeGpu, index: int) -> int:
    if index != pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
        return max(gpu.peer_to_peer, other.peer_to_peer)
    switched = gpu.link_peer == other.link_peer == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    ends = [gpu.link_bus_ids.get(link) for link, state in enumerate(gpu.links) if state]
    met = any(gpu.links) and any(other.links) and (switched or other.bus_id in ends)
    return int(pynvml.NVML_P2P_STATUS_OK if met else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)


def _affinity(gpu: FakeGpu, words: int) -> Any:
    mask = (ctypes.c_ulonglong * words)()
    for cpu in gpu.cpus:
        mask[cpu // 64] |= 1 << (cpu % 64)
    return mask


_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetName": lambda gpu: gpu.name,
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, 0),
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=gpu.total, used=gpu.used),
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=87, memory=40),
    "nvmlDeviceGetPowerUsage": lambda gpu: 612_000,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    "nvmlDeviceGetTemperature": lambda gpu, sensor: 58,
    "nvmlDeviceGetClockInfo": lambda gpu, clock: {1: 1980, 2: 3201}[clock],
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.throttle_bits,
    "nvmlDeviceGetComputeRunningProcesses": lambda gpu: gpu.processes,
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: _known(gpu.energy_mj),
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, since: _known(gpu.ecc)[kind],
    "nvmlDeviceGetRemappedRows": lambda gpu: _known(gpu.remapped),
    "nvmlDeviceGetRetiredPages": lambda gpu, cause: [0] * _known(gpu.retired)[cause],
    "nvmlDeviceGetRetiredPagesPendingStatus": lambda gpu: _known(gpu.retired) and int(gpu.retirement_pending),
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: gpu.pcie["gen"],
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.pcie["gen_max"],
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: gpu.pcie["width"],
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: gpu.pcie["width_max"],
    "nvmlDeviceGetPcieReplayCounter": lambda gpu: 0,
    "nvmlGpmQueryDeviceSupport": lambda gpu: SimpleNamespace(isSupportedDevice=int(gpu.gpm is not None)),
    "nvmlDeviceGetNvLinkState": _link_state,
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: gpu.link_peer,
    "nvmlDeviceGetNvLinkRemotePciInfo": _remote,
    "nvmlDeviceGetPciInfo": _own_pci,
    "nvmlDeviceGetTopologyCommonAncestor": lambda gpu, other: max(gpu.road, other.road),
    "nvmlDeviceGetP2PStatus": _peer_status,
    "nvmlDeviceGetCpuAffinity": _affinity,
    "nvmlDeviceGetEccMode": lambda gpu: [1, 1],
    "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
}
_MODELLED = frozenset(_ANSWERS)
"""A test that takes one of these away plays an older binding, which lacks the name."""
