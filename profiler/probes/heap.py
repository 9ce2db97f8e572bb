"""The C library's heap: what it holds from the kernel, and how much of that is free."""

from __future__ import annotations

import ctypes
from functools import cache

from msgspec import Struct


class Heap(Struct, frozen=True, kw_only=True):
    used_bytes: int
    """In allocations that somebody holds, large ones included."""
    free_bytes: int
    """Freed by the program, kept by the heap for later: resident, but nobody's."""


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, all of size_t."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def read_heap() -> Heap | None:
    """The heap now; None where the C library does not tell (musl, glibc before 2.33)."""
    reader = _mallinfo2()
    if reader is None:
        return None
    numbers = reader()
    return Heap(used_bytes=numbers.uordblks + numbers.hblkhd, free_bytes=numbers.fordblks)


@cache
def _mallinfo2() -> ctypes._FuncPointer | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
        function.argtypes = []
    return function
