"""Makes the resident set of a rank follow what it holds: on the CPU kind the process is the device."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10


def return_freed_memory() -> None:
    """Hold glibc's thresholds at their first values, so that freed tensors leave the process at once.

    Left alone, glibc raises them to 32 MiB after the first large free; the heap then fragments and
    the resident set grows for hundreds of steps above what anybody holds. Costs time for page faults.
    Does nothing where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
