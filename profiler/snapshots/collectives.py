"""Collectives of a trace: size, time and bandwidth, by the rules of NVIDIA's nccl-tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

from msgspec import Struct

from llmtop.profiler.snapshots.tracefile import TraceEvent

_KINDS: tuple[tuple[str, str], ...] = (
    ("all_reduce", r"all_?reduce"),
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_to_all", r"all_?to_?all"),
    ("broadcast", r"broadcast"),
    ("barrier", r"barrier"),
    ("reduce", r"(?<!all)_?reduce(?!_?scatter)"),
    ("send_receive", r"send|recv"),
)
_COMMUNICATION = re.compile(r"^gloo:|nccl(Dev)?Kernel", re.IGNORECASE)
_ITEM_BYTES: tuple[tuple[str, int], ...] = (
    ("bfloat16", 2), ("half", 2), ("float16", 2), ("float8", 1), ("double", 8), ("float64", 8), ("float", 4),
    ("unsigned char", 1), ("signed char", 1), ("byte", 1), ("char", 1), ("bool", 1), ("short", 2),
    ("long", 8), ("int64", 8), ("int", 4),
)  # fmt: skip
"""By the beginning of a type's name, as operators (C++) and NCCL's records (torch) write it."""
_MICRO = 1e-6


class Collective(Struct, frozen=True, kw_only=True):
    """All calls of one collective with one size."""

    name: str
    calls: int
    seconds: float
    """Of all calls; in each is the time that a rank waits for slower ones."""
    shortest_seconds: float
    size_bytes: int | None = None
    """As nccl-tests counts it: what is gathered or scattered whole, else what a rank puts in."""
    dtype: str = ""
    group_size: int | None = None
    bus_bytes_per_second: float | None = None
    """Of the mean call: size / time x the factor below, so that it compares with a link's bandwidth."""
    best_bus_bytes_per_second: float | None = None
    """Of the shortest call, which waited least."""


def bus_factor(name: str, group_size: int) -> float:
    """Of nccl-tests, doc/PERFORMANCE.md: what a link carries for a byte of size."""
    if name == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        return (group_size - 1) / group_size
    return 1.0


def is_communication(event: TraceEvent) -> bool:
    """Whether it is a collective's own time: gloo's range, or NCCL's kernel."""
    return event.cat in ("kernel", "user_annotation") and _COMMUNICATION.search(event.name) is not None


def kind_of(event: TraceEvent) -> str:
    words = (event.args.collective or event.name).lower()
    return next((name for name, pattern in _KINDS if re.search(pattern, words)), words)


def collectives(events: Iterable[TraceEvent], world_size: int) -> tuple[Collective, ...]:
    """Those that took longest first."""
    groups: dict[tuple[str, int | None, str, int], list[float]] = {}
    for event in events:
        if not is_communication(event):
            continue
        name, members = kind_of(event), event.args.group_size or world_size
        size, dtype = _size(event, name, members)
        groups.setdefault((name, size, dtype, members), []).append(event.dur * _MICRO)
    found = [_collective(*key, seconds) for key, seconds in groups.items()]
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _collective(name: str, size: int | None, dtype: str, members: int, times: list[float]) -> Collective:
    total, shortest = sum(times), min(times)
    carried = None if size is None or members < 2 else size * bus_factor(name, members)
    return Collective(
        name=name,
        calls=len(times),
        seconds=total,
        shortest_seconds=shortest,
        size_bytes=size,
        dtype=dtype,
        group_size=members,
        bus_bytes_per_second=carried * len(times) / total if carried and total else None,
        best_bus_bytes_per_second=carried / shortest if carried and shortest else None,
    )


def _size(event: TraceEvent, name: str, members: int) -> tuple[int | None, str]:
    args = event.args
    if args.dtype and args.in_elements is not None:
        elements, whole = args.in_elements, max(args.in_elements, args.out_elements or 0)
        item = _item_bytes(args.dtype)
        if name in ("all_gather", "reduce_scatter"):
            elements = whole
        return (None if item is None else elements * item), args.dtype
    # Gloo tells a rank's own tensors.
    dtypes = args.input_type if isinstance(args.input_type, list) else []
    dims = args.input_dims if isinstance(args.input_dims, list) else []
    if not dtypes or not isinstance(dtypes[0], str):
        return None, ""
    item = _item_bytes(dtypes[0])
    # A tensor of a known type without dimensions is one number.
    elements = sum(_elements(one) or (0 if one else 1) for one in dims)
    if item is None or not elements:
        return None, dtypes[0]
    return elements * item * (members if name == "all_gather" else 1), dtypes[0]


def _elements(dims: Any) -> int:
    """Of a tensor's dimensions, or of a list of such."""
    if not isinstance(dims, list) or not dims:
        return 0
    if all(isinstance(one, int) for one in dims):
        return prod(dims)
    return sum(_elements(one) for one in dims)


def _item_bytes(dtype: str) -> int | None:
    name = dtype.lower().removeprefix("c10::").removeprefix("torch.")
    return next((size for start, size in _ITEM_BYTES if name.startswith(start)), None)
