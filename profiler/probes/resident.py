"""Memory of this process as the kernel sees it.

Read at every border of every step, so the files are opened once, and the mark of the peak is asked for where
it costs least (`getrusage`: 1 us, where `/proc/self/status` takes 8).
"""

from __future__ import annotations

import ctypes
import os
import resource
from functools import cache
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM_BYTES = 256
_SLACK_BYTES = 4 << 20
"""The kernel counts pages of each processor in lots, so two readings may differ by some."""


def rss_bytes() -> int | None:
    """Resident set now; None where /proc does not tell."""
    try:
        return int(os.pread(_PROCESS.opened("statm", os.O_RDONLY), _STATM_BYTES, 0).split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def pss_bytes() -> int | None:
    """Proportional set size: shared pages divided among those who share them."""
    return _kilobyte_field(Path("/proc/self/smaps_rollup"), "Pss:")


def peak_rss_bytes() -> int | None:
    """Largest resident set since the start or the last reset."""
    if _PROCESS.usage_follows:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _kilobyte_field(Path("/proc/self/status"), "VmHWM:")


def reset_peak_rss() -> bool:
    """Start a new high-water mark; False where the kernel does not permit it."""
    try:
        os.pwrite(_PROCESS.opened("clear_refs", os.O_WRONLY), b"5", 0)
    except OSError:
        return False
    if _PROCESS.usage_follows is None:
        _PROCESS.usage_follows = _usage_follows()
    return True


def rss_after_reset_bytes() -> int | None:
    """Resident set right after the mark was set back to it; the mark costs a third of a read of /proc when
    the caches are cold."""
    return peak_rss_bytes() if _PROCESS.usage_follows else rss_bytes()


def _usage_follows() -> bool:
    """Right after a reset: whether getrusage tells it too. It never falls below the peak of the program that
    called exec, which may have been larger than this one."""
    mark = _kilobyte_field(Path("/proc/self/status"), "VmHWM:")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return mark is not None and abs(used - mark) <= _SLACK_BYTES


class _Process:
    """What is known of this process; an open file of /proc/self goes on telling of who opened it."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self.usage_follows: bool | None = None

    def opened(self, name: str, flags: int) -> int:
        if name not in self._files:
            self._files[name] = os.open(f"/proc/self/{name}", flags | os.O_CLOEXEC)
        return self._files[name]

    def after_fork(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files, self.usage_follows = {}, None


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.after_fork)


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
