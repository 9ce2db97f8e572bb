"""A stand-in for the `pynvml` module: GPUs whose readings and failures a test sets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 3
GPU_IS_LOST = 15
GIB = 1024**3


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeGpu:
    def __init__(self, name: str = "NVIDIA H200", uuid: str = "GPU-aaaa", total: int = 140 * GIB) -> None:
        self.name: str | bytes = name
        self.uuid = uuid
        self.total = total
        self.used = 10 * GIB
        self.throttle_bits = 0
        self.fields: dict[int, int] = {138: 0, 139: 0, 197: 0, 198: 0}
        """Field to its running total; a field that is absent is not supported."""
        self.processes: list[Any] = []
        self.lost = False
        self.broken: dict[str, int] = {}
        """NVML function to the error code that it answers with."""


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class FakeNvml:
    """Behaves like the module: functions by name, an error class, constants."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198

    def __init__(self, *gpus: FakeGpu, init_error: int | None = None) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.calls: list[str] = []
        self.requested: list[list[Any]] = []

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.calls.append("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answer = _ANSWERS.get(name)
        if answer is None:
            raise AttributeError(name)

        def call(gpu: FakeGpu, *arguments: Any) -> Any:
            self.calls.append(name)
            if gpu.lost:
                raise NVMLError(GPU_IS_LOST)
            if name in gpu.broken:
                raise NVMLError(gpu.broken[name])
            return answer(gpu, *arguments)

        return call

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, requests: list[Any]) -> list[SimpleNamespace]:
        self.requested.append(requests)
        if gpu.lost:
            raise NVMLError(GPU_IS_LOST)
        return [_field(gpu, request) for request in requests]


def _field(gpu: FakeGpu, request: Any) -> SimpleNamespace:
    number = request[0] if isinstance(request, tuple) else request
    if number not in gpu.fields:
        return SimpleNamespace(nvmlReturn=NOT_SUPPORTED, valueType=0, value=SimpleNamespace(dVal=0.0))
    total = SimpleNamespace(ullVal=gpu.fields[number])
    return SimpleNamespace(nvmlReturn=0, valueType=3, value=total)


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
}
