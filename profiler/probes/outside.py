"""Reads what lies on the device outside the allocator, at known moments of a rank's life."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pynvml
import torch
import torch.distributed

from llmtop.profiler.probes.baseline import device_handle
from llmtop.profiler.record.events import OutsideMeasured, OutsideMoment

_AFTER: dict[int, OutsideMoment] = {1: "first_step", 2: "second_step"}
"""Steps since this process began: kernels are loaded when they are first used."""


class OutsideProbe:
    """A reading costs milliseconds: for start-up and the first steps only."""

    def __init__(self, local_rank: int, emit: Callable[[OutsideMeasured], None], nvml: Any = pynvml) -> None:
        self._local_rank = local_rank
        self._emit = emit
        self._nvml = nvml

    def after_steps(self, steps: int) -> None:
        """So many steps since this process began are made."""
        moment = _AFTER.get(steps)
        if moment is not None:
            self.measure(moment)

    def measure(self, moment: OutsideMoment) -> None:
        """Tell what NVML and the allocator say now. Touches no CUDA context."""
        device, process = self._read()
        # Zero as long as there is no context.
        reserved = torch.cuda.memory_reserved()
        if process is not None and process < reserved:
            # In a container another process of the host may bear this one's number.
            process = None
        self._emit(
            OutsideMeasured(
                moment=moment,
                device_used_bytes=device,
                process_used_bytes=process,
                reserved_bytes=reserved,
            )
        )

    def _read(self) -> tuple[int | None, int | None]:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                handle = device_handle(self._local_rank, nvml)
                if handle is None:
                    return None, None
                used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                return used, self._own(handle)
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError:
            return None, None

    def _own(self, handle: Any) -> int | None:
        """Of this process; None where NVML counts processes as another namespace numbers them."""
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError:
            return None
        own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        return int(own[0]) if own and own[0] is not None else None


def make_context(device: torch.device) -> None:
    """Create the CUDA context and nothing else, so that it can be measured alone."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def first_collective(device: torch.device) -> None:
    """Have the process group make its buffers now."""
    torch.distributed.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize(device)
