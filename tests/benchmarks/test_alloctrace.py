"""Recorded allocations read back and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.alloctrace import check, replay, save
from llmtop.profiler.memory.pool import MIB


def entry(action: str, size: int, addr: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "size": size, "addr": addr, "stream": stream, "time_us": 7}


ENTRIES = [
    entry("segment_alloc", 20 * MIB, 0),
    entry("alloc", 4 * MIB, 0),
    entry("segment_alloc", 32 * MIB, 1 << 30),
    entry("alloc", 32 * MIB, 1 << 30),
    entry("free_requested", 4 * MIB, 0),
    entry("free_completed", 4 * MIB, 0),
    entry("alloc", 8 * MIB, 0),
    entry("snapshot", 0, 0),
]


def test_what_torch_held_is_what_the_pool_holds(tmp_path: Path) -> None:
    import numpy

    save(tmp_path / "a.npz", ENTRIES)
    found = replay(numpy.load(tmp_path / "a.npz"))
    assert found["peak_held_bytes"] == found["pool_peak_held_bytes"] == 52 * MIB
    assert (found["peak_allocated_bytes"], found["frees_of_unknown"]) == (40 * MIB, 0)
    assert "a.npz: pool off by +0.00 %" in check(tmp_path)
