"""What the C library does with freed memory: on the CPU kind the process is the device.

A rank starts by giving every freed tensor back to the kernel at once, so that its resident set is exactly
what it holds; so its first steps are measured. That costs page faults (of a step of the small CPU model 7 to
35 %), so after them freed memory is kept for the next step. The resident set then lies above what is in
use by what the heap keeps, and the process cannot come back: a heap in pieces serves what would otherwise be
mapped alone (a later step measured after `malloc_trim` still held 20 MiB more than the first).
"""

from __future__ import annotations

import ctypes

EXACT_STEPS = 3
"""Of each process: in the second the optimizer's states exist from the start, and in the third kernels are
recorded, which would leave a heap in pieces behind."""
# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_GIVEN_BACK_BYTES = 128 << 10
"""Where glibc begins. Left alone it rises to 32 MiB after the first large free."""
_MAPPED_ALONE_BYTES = 32 << 20
_MOST_KEPT_BYTES = 1 << 30


def return_freed_memory() -> bool:
    """Freed tensors leave the process at once; False where the C library has no mallopt."""
    return _set_thresholds(_GIVEN_BACK_BYTES, _GIVEN_BACK_BYTES)


def keep_freed_memory() -> bool:
    """Freed tensors stay in the heap for the next step; False where the C library has no mallopt."""
    return _set_thresholds(_MAPPED_ALONE_BYTES, _MOST_KEPT_BYTES)


def _set_thresholds(mapped_alone_bytes: int, kept_bytes: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt(_M_MMAP_THRESHOLD, mapped_alone_bytes)
    mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    return True
