"""What the CUDA allocator holds, from a snapshot of torch: by component, and by the lines that asked for it.

The structure is that of `torch.cuda.memory._snapshot()` (torch/cuda/memory.py, and the types in
torch/cuda/_memory_viz.py): segments with blocks, each block with the frames that asked for it where stacks
were recorded.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

UNNAMED = "unnamed"
"""Nothing that the engine keeps between calls: activations for the most part, and workspaces."""
PENDING = "freed, in use by another stream"
FREE = "reserved, free"
TOP_SITES = 20
_LIBRARY = re.compile(r"-packages/(torch|deepspeed)/|^<frozen")
_MEMORY_STATES = {"active_allocated", "active_awaiting_free", "active_pending_free", "inactive"}


class AllocationSite(Struct, frozen=True, kw_only=True):
    where: str
    """File, line and function of the innermost frame outside torch and DeepSpeed, else of the innermost."""
    size_bytes: int
    blocks: int


class BlockSummary(Struct, frozen=True, kw_only=True, tag="blocks"):
    schema_version: int = 1
    rank: int
    step: int
    reserved_bytes: int
    allocated_bytes: int
    components: dict[str, int]
    """They add up to what is reserved."""
    largest_free_bytes: int = 0
    segments: int = 0
    blocks: int = 0
    """Allocated ones."""
    sites: tuple[AllocationSite, ...] = ()
    """The largest first; empty where no stacks were recorded."""


def summarise_blocks(
    snapshot: Mapping[str, Any], named: Iterable[tuple[int, int, str]], *, device: int, rank: int, step: int
) -> BlockSummary:
    """Of one device. `named` are storages that are known: address, bytes, component."""
    segments = [each for each in snapshot["segments"] if each["device"] == device]
    blocks = [block for segment in segments for block in _with_addresses(segment)]
    allocated = [block for block in blocks if block["state"] == "active_allocated"]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    components = _by_component(allocated, named)
    components[PENDING] = sum(
        block["size"] for block in blocks if block["state"] not in ("active_allocated", "inactive")
    )
    components[FREE] = sum(free)
    return BlockSummary(
        rank=rank,
        step=step,
        reserved_bytes=sum(segment["total_size"] for segment in segments),
        allocated_bytes=sum(block["size"] for block in allocated),
        components={name: size for name, size in components.items() if size},
        largest_free_bytes=max(free, default=0),
        segments=len(segments),
        blocks=len(allocated),
        sites=_sites(allocated),
    )


def _with_addresses(segment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Older versions of torch leave a block's address out: blocks lie one behind the other."""
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] not in _MEMORY_STATES:
            raise ValueError(f"a block in the unknown state {block['state']!r}")
        yield {"address": address, **block}
        address += block["size"]


def _by_component(
    blocks: Sequence[Mapping[str, Any]], named: Iterable[tuple[int, int, str]]
) -> dict[str, int]:
    """A block is what the largest known storage in it is."""
    known = sorted(named)
    starts = [address for address, _, _ in known]
    sums: dict[str, int] = {}
    for block in blocks:
        first = bisect_left(starts, block["address"])
        end = bisect_left(starts, block["address"] + block["size"])
        inside = known[first:end]
        name = max(inside, key=lambda storage: storage[1])[2] if inside else UNNAMED
        sums[name] = sums.get(name, 0) + block["size"]
    return sums


def _sites(blocks: Iterable[Mapping[str, Any]]) -> tuple[AllocationSite, ...]:
    sums: dict[str, tuple[int, int]] = {}
    for block in blocks:
        where = _where(block.get("frames") or ())
        if where:
            size, count = sums.get(where, (0, 0))
            sums[where] = (size + block["size"], count + 1)
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:TOP_SITES]
    return tuple(
        AllocationSite(where=where, size_bytes=size, blocks=count) for where, (size, count) in largest
    )


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """Frames come innermost first."""
    own = [frame for frame in frames if not _LIBRARY.search(frame["filename"])]
    frame = next(iter(own or frames), None)
    return "" if frame is None else f"{frame['filename']}:{frame['line']} {frame['name']}"
