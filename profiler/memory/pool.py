"""What torch's caching allocator takes from the driver for a sequence of allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.11, without expandable segments): sizes
are rounded to 512 bytes; requests of at most 1 MiB are cut from segments of 2 MiB, larger ones below 10 MiB
from segments of 20 MiB, and others get a segment of their own in steps of 2 MiB. A request takes the
smallest free block of its pool and stream that is large enough; what is left over becomes a free block when
it is large enough to be of use; free neighbours within a segment are joined again.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 1024**2
_SMALLEST = 512
_SMALL = MIB
"""kSmallSize: the largest request of the small pool; what is left over of a large block must exceed it."""
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
"""kMinLargeAlloc: from here on a request has a segment of its own."""
_STEP = 2 * MIB


def rounded(size: int) -> int:
    """The bytes of a block for a request."""
    return max(_SMALLEST, -(-size // _SMALLEST) * _SMALLEST)


def segment_bytes(size: int) -> int:
    """What is asked of the driver for a rounded request that no free block can serve."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _STEP) * _STEP


OWN_BLOCKS = 0.75
"""How many large tensors lie in a block that was made for their size; the others reuse one that fits as well
(three runs on H200 with tensors that leave an end: 0.6 to 0.9)."""


def block_end(size: int) -> int:
    """Bytes that the block of a tensor has beyond it, when it was made for that: an end of at most 1 MiB is
    no block of its own."""
    if size <= _SMALL:
        return 0
    if size < _OWN_SEGMENT:
        fitting = _LARGE_SEGMENT // size
        left = _LARGE_SEGMENT - fitting * size
        return left // fitting if left <= _SMALL else 0
    left = -size % _STEP
    return left if left <= _SMALL else 0


class Block:
    """A piece of a segment, between its neighbours."""

    __slots__ = ("free", "next", "place", "pool", "previous", "size")

    def __init__(self, size: int, place: int, pool: tuple[int, bool]) -> None:
        self.size, self.place, self.pool = size, place, pool
        self.free = False
        self.previous: Block | None = None
        self.next: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return (self.size, self.place) < (other.size, other.place)


class Pool:
    """One device's allocator: what is given out, what is held, and the most of both."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._free: dict[tuple[int, bool], list[Block]] = {}
        """By stream and whether small: sorted by size, then place."""
        self._end = 0
        """Where the next segment lies; the driver's own order is not known."""

    def allocate(self, size: int, stream: int = 0) -> Block:
        size = rounded(size)
        small = size <= _SMALL
        block = self._take((stream, small), size) or self._segment((stream, small), size)
        left = block.size - size
        if left >= _SMALLEST if small else left > _SMALL:
            self._split(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        free = self._free.setdefault(block.pool, [])
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                del free[bisect_left(free, neighbour)]
                block = _joined(block, neighbour)
        block.free = True
        insort(free, block)

    def release_cached(self) -> None:
        """Give whole free segments back to the driver, as `torch.cuda.empty_cache` does."""
        for pool, blocks in self._free.items():
            whole = [block for block in blocks if block.previous is None and block.next is None]
            self.reserved_bytes -= sum(block.size for block in whole)
            self._free[pool] = [block for block in blocks if block.previous or block.next]

    def _take(self, pool: tuple[int, bool], size: int) -> Block | None:
        free = self._free.get(pool)
        if not free:
            return None
        place = bisect_left(free, size, key=_size_of)
        if place == len(free):
            return None
        block = free.pop(place)
        block.free = False
        return block

    def _segment(self, pool: tuple[int, bool], size: int) -> Block:
        block = Block(segment_bytes(size), self._end, pool)
        self._end += block.size
        self.reserved_bytes += block.size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.place + size, block.pool)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size, rest.free = rest, size, True
        insort(self._free.setdefault(block.pool, []), rest)


def _size_of(block: Block) -> int:
    return block.size


def _joined(block: Block, neighbour: Block) -> Block:
    first, second = (neighbour, block) if neighbour.place < block.place else (block, neighbour)
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first
