"""Reads the figures out of the message of an allocation that failed. Pure: the worker calls it, and tests.

torch 2.13 `c10/cuda/CUDACachingAllocator.cpp` (`malloc`, `reportProcessMemoryInfo`) and
`c10/core/impl/alloc_cpu.cpp`; the wording of torch before 2.1 is read too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from llmtop.profiler.record.failureevents import DeviceUse, MemoryShortage

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB))"
_REQUESTED = re.compile(rf"Tried to allocate {_SIZE}")
_DEVICE = re.compile(r"\bGPU (\d+)")
_TOTAL = re.compile(rf"total capac\w*ty of {_SIZE}|{_SIZE} total capacity")
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} free")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOWED = re.compile(rf"{_SIZE} allowed")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated")
_CACHED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ON_HOST = re.compile(r"you tried to allocate (\d+) bytes")


class _Size(NamedTuple):
    size_bytes: int
    resolution_bytes: int


def read_shortage(message: str) -> MemoryShortage | None:
    """None for a message that tells no size."""
    host = _ON_HOST.search(message)
    if host is not None:
        return MemoryShortage(requested_bytes=int(host.group(1)), on_host=True)
    requested = _found(_REQUESTED, message)
    if requested is None:
        return None
    device = _DEVICE.search(message)
    allocated = _bytes(_ALLOCATED, message)
    cached, reserved = _bytes(_CACHED, message), _bytes(_RESERVED, message)
    if cached is None and reserved is not None and allocated is not None:
        cached = max(0, reserved - allocated)
    return MemoryShortage(
        requested_bytes=requested.size_bytes,
        resolution_bytes=requested.resolution_bytes,
        device=int(device.group(1)) if device else None,
        total_bytes=_bytes(_TOTAL, message),
        free_bytes=_bytes(_FREE, message),
        own_bytes=_bytes(_OWN, message),
        allowed_bytes=_bytes(_ALLOWED, message),
        allocated_bytes=allocated,
        cached_bytes=cached,
        processes=tuple(
            DeviceUse(pid=int(pid), used_bytes=_read(size).size_bytes)
            for pid, size in _PROCESS.findall(message)
        ),
    )


def short_message(message: str) -> str:
    """Its first line as far as the size that was asked for, where it tells one: the rest is figures."""
    line = message.strip().partition("\n")[0].rstrip(". ")
    asked = _REQUESTED.search(line)
    return line[: asked.end()] if asked is not None else line


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    found = _found(pattern, message)
    return None if found is None else found.size_bytes


def _found(pattern: re.Pattern[str], message: str) -> _Size | None:
    match = pattern.search(message)
    if match is None:
        return None
    return _read(next(group for group in match.groups() if group is not None))


def _read(text: str) -> _Size:
    """A size as torch prints it: whole bytes, or two decimals of a larger unit."""
    number, unit = text.split()
    decimals = len(number.partition(".")[2])
    factor = _UNITS[unit]
    return _Size(round(float(number) * factor), max(1, round(factor / 10**decimals)))
