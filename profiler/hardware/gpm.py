"""GPM: how busy the parts of a GPU were between two samples. Hopper and newer.

The driver keeps a sample in a buffer that the caller owns; metrics are computed from two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmtop.profiler.hardware.nvmlcalls import NvmlCalls

_MIB = 1024**2
SHORTEST_SECONDS = 0.1
"""NVML asks for at least this between the two samples."""

_METRICS: tuple[tuple[str, str, int, float], ...] = (
    ("sm_active_percent", "NVML_GPM_METRIC_SM_UTIL", 2, 1.0),
    ("sm_occupancy_percent", "NVML_GPM_METRIC_SM_OCCUPANCY", 3, 1.0),
    ("tensor_active_percent", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 5, 1.0),
    ("dram_active_percent", "NVML_GPM_METRIC_DRAM_BW_UTIL", 10, 1.0),
    ("fp32_active_percent", "NVML_GPM_METRIC_FP32_UTIL", 12, 1.0),
    ("fp16_active_percent", "NVML_GPM_METRIC_FP16_UTIL", 13, 1.0),
    ("pcie_tx_bytes_per_second", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", 20, _MIB),
    ("pcie_rx_bytes_per_second", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", 21, _MIB),
    ("nvlink_rx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", 60, _MIB),
    ("nvlink_tx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", 61, _MIB),
)
"""Field of a device sample, metric by its name and number in nvml.h, and what one of its units is."""


def gpm_supported(calls: NvmlCalls, handle: Any) -> bool | None:
    """None where driver or binding do not know GPM."""
    support = calls.ask("nvmlGpmQueryDeviceSupport", handle)
    return None if support is None else bool(support.isSupportedDevice)


class GpmReader:
    """One device's GPM: two buffers in turn."""

    def __init__(self, calls: NvmlCalls, handle: Any, clock: Callable[[], float]) -> None:
        self._calls, self._handle, self._clock = calls, handle, clock
        self._buffers: list[Any] = []
        if gpm_supported(calls, handle):
            buffers = [calls.ask("nvmlGpmSampleAlloc") for _ in range(2)]
            self._buffers = [buffer for buffer in buffers if buffer is not None]
        self.supported = len(self._buffers) == 2
        self._taken_at: float | None = None
        """When the first buffer was filled; None while it holds nothing."""
        self._newest: dict[str, Any] = {}

    def read(self) -> dict[str, float | None]:
        """Fields of a device sample; nothing before the second call and while the device does not answer."""
        if not self.supported:
            return {}
        now = self._clock()
        if self._taken_at is not None and now - self._taken_at < SHORTEST_SECONDS:
            return self._newest
        before, buffer = self._buffers
        if self._calls.ask("nvmlGpmSampleGet", self._handle, buffer) is None:
            self._taken_at, self._newest = None, {}
            return {}
        had_one = self._taken_at is not None
        self._buffers, self._taken_at = [buffer, before], now
        self._newest = self._metrics(before, buffer) if had_one else {}
        return self._newest

    def _metrics(self, before: Any, after: Any) -> dict[str, float | None]:
        nvml = self._calls.nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._calls.constant("NVML_GPM_METRICS_GET_VERSION", 1)
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = before, after
        for place, (_, name, number, _) in enumerate(_METRICS):
            request.metrics[place].metricId = self._calls.constant(name, number)
        if self._calls.ask("nvmlGpmMetricsGet", request) is None:
            return {}
        found: dict[str, float | None] = {}
        for place, (field, _, _, scale) in enumerate(_METRICS):
            metric = request.metrics[place]
            # Not a number, and numbers below zero, are what a counter gives that does not run.
            sound = metric.nvmlReturn == 0 and metric.value >= 0
            # To a hundredth: more digits would only fill the record.
            found[field] = round(metric.value * scale, 2) if sound else None
        return found

    def close(self) -> None:
        for buffer in self._buffers:
            # Freed in the state that NVML gave it in: the binding takes the pointer itself.
            self._calls.ask("nvmlGpmSampleFree", buffer)
        self._buffers, self.supported = [], False
