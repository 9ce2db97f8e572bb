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
LARGE_SEGMENT = 20 * MIB
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
    return LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _STEP) * _STEP


OWN_BLOCKS = 0.75
"""How many large tensors lie in a block that was made for their size; the others reuse one that fits as well
(three runs on H200 with tensors that leave an end: 0.6 to 0.9)."""


def block_end(size: int) -> int:
    """Bytes that the block of a tensor has beyond it, when it was made for that: an end of at most 1 MiB is
    no block of its own."""
    if size <= _SMALL:
        return 0
    if size < _OWN_SEGMENT:
        fitting = LARGE_SEGMENT // size
        left = LARGE_SEGMENT - fitting * size
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


_Free = list[tuple[int, int, Block]]
"""Size, place and block, in that order; no two have the same place."""


class Pool:
    """One device's allocator: what is given out, what is held, and the most of both."""

    def __init__(self, room_bytes: int | None = None) -> None:
        """`room_bytes` is what the driver can give at most; None: without end."""
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.missing_bytes = 0
        """What the driver could not give at most, after all that was cached had gone back to it."""
        self.reserved_of_streams: dict[int, int] = {}
        self.at_peak: tuple[int, dict[int, int]] = (0, {})
        """When most was reserved: what was allocated, and what was reserved by stream."""
        self._room = room_bytes
        self._free: dict[tuple[int, bool], _Free] = {}
        """By stream and whether small."""
        self._end = 0
        """Where the next segment ends: the driver places each below the one before (seen on H200, driver
        580), and of free blocks of the same size the one with the lowest address is taken."""

    def allocate(self, size: int, stream: int = 0) -> Block:
        size = -(-size // _SMALLEST) * _SMALLEST or _SMALLEST
        small = size <= _SMALL
        pool = (stream, small)
        free = self._free.get(pool)
        if free is None:
            free = self._free[pool] = []
        at = bisect_left(free, (size,))
        if at < len(free):
            block = free.pop(at)[2]
            block.free = False
        else:
            block = self._segment(pool, size)
            if self.reserved_bytes > self.peak_reserved_bytes:
                self.peak_reserved_bytes = self.reserved_bytes
                self.at_peak = (self.allocated_bytes + size, dict(self.reserved_of_streams))
        left = block.size - size
        if left >= _SMALLEST if small else left > _SMALL:
            rest = Block(left, block.place + size, pool)
            rest.previous, rest.next = block, block.next
            if block.next is not None:
                block.next.previous = rest
            block.next, block.size, rest.free = rest, size, True
            insort(self._free[pool], (left, rest.place, rest))
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        free = self._free[block.pool]
        before, after = block.previous, block.next
        if after is not None and after.free:
            del free[bisect_left(free, (after.size, after.place))]
            _join(block, after)
        if before is not None and before.free:
            del free[bisect_left(free, (before.size, before.place))]
            _join(before, block)
            block = before
        block.free = True
        insort(free, (block.size, block.place, block))

    def release_cached(self) -> None:
        """Give whole free segments back to the driver, as `torch.cuda.empty_cache` does."""
        for pool, blocks in self._free.items():
            kept = [entry for entry in blocks if entry[2].previous or entry[2].next]
            given = sum(entry[0] for entry in blocks) - sum(entry[0] for entry in kept)
            self.reserved_bytes -= given
            if given:
                self.reserved_of_streams[pool[0]] -= given
            self._free[pool] = kept

    def _segment(self, pool: tuple[int, bool], size: int) -> Block:
        asked = segment_bytes(size)
        if self._room is not None and self.reserved_bytes + asked > self._room:
            # The driver refuses; what is cached goes back to it before the allocator gives up.
            self.release_cached()
            self.missing_bytes = max(self.missing_bytes, self.reserved_bytes + asked - self._room)
        self._end -= asked
        block = Block(asked, self._end, pool)
        self.reserved_bytes += asked
        self.reserved_of_streams[pool[0]] = self.reserved_of_streams.get(pool[0], 0) + asked
        return block


def _join(first: Block, second: Block) -> None:
    """Make the first of two neighbours both."""
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
