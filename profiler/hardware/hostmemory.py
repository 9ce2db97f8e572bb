"""How much memory a run can use of this machine. A module of its own: a plan asks no more of the machine."""

from __future__ import annotations

import os

from llmtop.profiler.hardware.cgroup import cgroup_memory


def host_memory_bytes() -> int | None:
    """All of the machine's, or the cgroup's limit if that is less."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return cgroup_memory().limit_bytes
    limit = cgroup_memory().limit_bytes
    return total if limit is None else min(total, limit)
