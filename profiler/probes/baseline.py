"""What the process and its device hold before the model exists."""

from __future__ import annotations

from typing import Any

import pynvml

from llmtop.profiler.hardware.nvml import visible_device_indices
from llmtop.profiler.hardware.nvmlcalls import NvmlCalls, text
from llmtop.profiler.probes.resident import pss_bytes, rss_bytes
from llmtop.profiler.record.events import BaselineMeasured


def device_used_bytes(local_rank: int) -> int | None:
    """NVML's reading of the device that this rank will use or uses. Touches no CUDA context."""
    try:
        pynvml.nvmlInit()
        try:
            handle = device_handle(local_rank)
            return None if handle is None else int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def baseline(*, local_rank: int, device_used_before_bytes: int | None, on_cpu: bool) -> BaselineMeasured:
    return BaselineMeasured(
        rss_bytes=rss_bytes(),
        pss_bytes=pss_bytes(),
        device_used_bytes=None if on_cpu else device_used_bytes(local_rank),
        device_used_before_bytes=device_used_before_bytes,
    )


def device_handle(local_rank: int, nvml: Any = pynvml) -> Any | None:
    """NVML counts all devices, CUDA only the visible ones; None for a rank that has none of them."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    calls = NvmlCalls(nvml)
    visible = visible_device_indices([text(calls.ask("nvmlDeviceGetUUID", handle)) for handle in handles])
    return handles[visible[local_rank]] if local_rank < len(visible) else None
