"""Whether a state, or weights, will fit where they are to be written, before a byte of them is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from llmtop.profiler.hardware.cgroup import cgroup_memory
from llmtop.profiler.hardware.disk import MEMORY_FILE_SYSTEMS, existing, file_system, free_bytes
from llmtop.profiler.units import format_bytes

_SPARE_BYTES = 64 << 20
"""Left free for logs, events and the index."""


def why_no_room(folder: Path, needed_bytes: int) -> str | None:
    """The reason in words, or None when it fits or nobody can tell."""
    free = free_bytes(folder)
    if free is not None and free < needed_bytes + _SPARE_BYTES:
        return (
            f"it takes {format_bytes(needed_bytes)}, and {existing(folder)} has {format_bytes(free)} free,"
            f" where {format_bytes(_SPARE_BYTES)} must stay free"
        )
    kind = file_system(folder)
    if kind is None or kind.kind not in MEMORY_FILE_SYSTEMS:
        return None
    left = memory_left_bytes()
    if left < needed_bytes + _SPARE_BYTES:
        return (
            f"it takes {format_bytes(needed_bytes)} of host memory, and {format_bytes(left)} is available,"
            f" where {format_bytes(_SPARE_BYTES)} must stay available"
        )
    return None


def memory_left_bytes() -> int:
    """Host memory that can still be taken, under the machine's limit and the cgroup's."""
    group = cgroup_memory()
    left = int(import_module("psutil").virtual_memory().available)
    if group.limit_bytes is None or group.used_bytes is None:
        return left
    return min(left, group.limit_bytes - group.used_bytes)
