"""The readers of this machine's hardware in one place. None of them loads torch."""

from __future__ import annotations

from llmtop.profiler.hardware.cgroup import cgroup_memory
from llmtop.profiler.hardware.host import HostReader, host_memory_bytes
from llmtop.profiler.hardware.machine import detect_machine, torch_with_cuda
from llmtop.profiler.hardware.nvml import NvmlReader, visible_device_indices
from llmtop.profiler.hardware.processes import process_tree_memory

__all__ = [
    "HostReader",
    "NvmlReader",
    "cgroup_memory",
    "detect_machine",
    "torch_with_cuda",
    "host_memory_bytes",
    "process_tree_memory",
    "visible_device_indices",
]
