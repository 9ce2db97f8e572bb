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
    """A piece of a segment, between its neighbours; to whom it was given it is a tensor's storage.

    An object of its own for each tensor, made and thrown away thousands of times, would be a sixth of a
    simulated run.
    """

    __slots__ = ("holders", "is_view", "key", "next", "place", "previous", "shelf", "size")

    size: int
    place: int
    shelf: Shelf
    key: int
    """Of a free block, its place on the shelf; else 0."""
    previous: Block
    next: Block
    """`_NO_BLOCK` at the ends of a segment."""
    holders: int
    """How many have it, once it was given out."""
    is_view: bool
    """Whether the tensor is a view of what an operation returned."""


_NO_BLOCK = Block()
_NO_BLOCK.key = 0
"""Never free, so that nothing is joined to it."""

UNCOUNTED = Block()
UNCOUNTED.holders, UNCOUNTED.is_view = 1 << 60, False
"""Every request that is too small to count; it is never without a holder."""

_PLACE_BITS = 44
_PLACE_END = 1 << _PLACE_BITS - 1
"""Above all places: segments of 8 TiB in all can lie below it."""


class Shelf:
    """The free blocks of one stream, small or large: the smallest first, and of those the lowest."""

    __slots__ = ("blocks", "keys", "least_rest", "stream")

    def __init__(self, stream: int, *, small: bool) -> None:
        self.stream = stream
        self.least_rest = _SMALLEST if small else _SMALL + 1
        """What is left over of a block is one of its own from here on."""
        self.keys: list[int] = []
        """Size and place in one number, in order: numbers are compared several times as fast as tuples."""
        self.blocks: dict[int, Block] = {}

    def release(self) -> int:
        """Let go of whole free segments: their bytes."""
        whole = {key for key, block in self.blocks.items() if block.previous is block.next is _NO_BLOCK}
        self.keys[:] = [key for key in self.keys if key not in whole]
        return sum(self.blocks.pop(key).size for key in whole)


class Pool:
    """One device's allocator: what is given out, what is held, and the most of both.

    `allocate` and `free` are most of a simulated run, so they call nothing of their own.
    """

    def __init__(self, room_bytes: int | None = None, *, least_bytes: int = 0) -> None:
        """`room_bytes` is what the driver can give at most; None: without end. Requests below `least_bytes`
        are left out: all are the one block `UNCOUNTED`."""
        self.least_bytes = least_bytes
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
        self._shelves: dict[int, tuple[Shelf, Shelf]] = {}
        """Small and large, by stream."""
        self._end = _PLACE_END
        """Where the next segment ends: the driver places each below the one before (seen on H200, driver
        580), and of free blocks of the same size the one with the lowest address is taken."""
        self.on_stream(0)

    def on_stream(self, stream: int) -> None:
        """What is allocated from here on is for this stream: each has free blocks of its own."""
        both = self._shelves.get(stream)
        if both is None:
            both = self._shelves[stream] = Shelf(stream, small=True), Shelf(stream, small=False)
        self._small, self._large = both

    def allocate(self, size: int) -> Block:
        """A block with one holder."""
        if size < self.least_bytes:
            return UNCOUNTED
        size = (size + _SMALLEST - 1) & -_SMALLEST or _SMALLEST
        shelf = self._small if size <= _SMALL else self._large
        keys = shelf.keys
        at = bisect_left(keys, size << _PLACE_BITS)
        block = shelf.blocks.pop(keys.pop(at)) if at < len(keys) else self._segment(shelf, size)
        block.key = 0
        block.holders = 1
        block.is_view = False
        given = block.size
        left = given - size
        if left >= shelf.least_rest:
            rest = Block()
            rest.size, rest.shelf = left, shelf
            rest.place = place = block.place + size
            rest.previous, rest.next = block, block.next
            block.next.previous = rest
            block.next, block.size = rest, size
            rest.key = key = (left << _PLACE_BITS) + place
            insort(keys, key)
            shelf.blocks[key] = rest
            given = size
        self.allocated_bytes += given
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def passing(self, size: int) -> None:
        """The same as to allocate and to free at once; where a free block serves, it stays as it is."""
        if size < self.least_bytes:
            return
        rounded_size = (size + _SMALLEST - 1) & -_SMALLEST or _SMALLEST
        shelf = self._small if rounded_size <= _SMALL else self._large
        at = bisect_left(shelf.keys, rounded_size << _PLACE_BITS)
        if at == len(shelf.keys):
            self.free(self.allocate(size))
            return
        found = shelf.keys[at] >> _PLACE_BITS
        taken = rounded_size if found - rounded_size >= shelf.least_rest else found
        if self.allocated_bytes + taken > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes + taken

    def free(self, block: Block | None) -> None:
        """One holder less; a block without holders is free, and joined to its free neighbours."""
        if block is None:
            return
        block.holders -= 1
        if block.holders:
            return
        size, shelf = block.size, block.shelf
        keys = shelf.keys
        self.allocated_bytes -= size
        after, before = block.next, block.previous
        if after.key:
            key = after.key
            del keys[bisect_left(keys, key)], shelf.blocks[key]
            size += after.size
            after = block.next = after.next
            after.previous = block
        if before.key:
            key = before.key
            del keys[bisect_left(keys, key)], shelf.blocks[key]
            size += before.size
            before.next, after.previous = after, before
            block = before
        block.size = size
        block.key = key = (size << _PLACE_BITS) + block.place
        insort(keys, key)
        shelf.blocks[key] = block

    def release_cached(self) -> None:
        """Give whole free segments back to the driver, as `torch.cuda.empty_cache` does."""
        for shelf in (shelf for both in self._shelves.values() for shelf in both):
            given = shelf.release()
            self.reserved_bytes -= given
            if given:
                self.reserved_of_streams[shelf.stream] -= given

    def _segment(self, shelf: Shelf, size: int) -> Block:
        asked = segment_bytes(size)
        if self._room is not None and self.reserved_bytes + asked > self._room:
            # The driver refuses; what is cached goes back to it before the allocator gives up.
            self.release_cached()
            self.missing_bytes = max(self.missing_bytes, self.reserved_bytes + asked - self._room)
        self._end -= asked
        block = Block()
        block.size, block.place, block.shelf = asked, self._end, shelf
        block.previous = block.next = _NO_BLOCK
        self.reserved_bytes += asked
        of_stream = self.reserved_of_streams
        of_stream[shelf.stream] = of_stream.get(shelf.stream, 0) + asked
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
            self.at_peak = (self.allocated_bytes + size, dict(of_stream))
        return block
