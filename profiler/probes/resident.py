"""Memory of this process as the kernel sees it."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int | None:
    """Resident set now; None where /proc does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def pss_bytes() -> int | None:
    """Proportional set size: shared pages divided among those who share them."""
    return _kilobyte_field(Path("/proc/self/smaps_rollup"), "Pss:")


def peak_rss_bytes() -> int | None:
    """Largest resident set since the start or the last reset."""
    return _kilobyte_field(Path("/proc/self/status"), "VmHWM:")


def reset_peak_rss() -> bool:
    """Start a new high-water mark; False where the kernel does not permit it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def resident_bytes(address: int, size: int) -> int:
    """How much of a stretch of memory is backed by pages: a buffer's untouched end costs nothing."""
    first = address - address % _PAGE_BYTES
    pages = (address + size - first + _PAGE_BYTES - 1) // _PAGE_BYTES
    states = (ctypes.c_ubyte * pages)()
    if _libc().mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * _PAGE_BYTES), states) != 0:
        return size
    return min(size, bytes(states).count(1) * _PAGE_BYTES)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _kilobyte_field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        return None
    return None
