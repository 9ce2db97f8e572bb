"""The caching allocator's rules, and what holds for any sequence of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.profiler.memory.pool import MIB, Block, Pool, block_end, rounded, segment_bytes


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "held_bytes"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),
        (int(18.5 * MIB), int(18.5 * MIB), 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 22 * MIB),
    ],
)
def test_a_first_request(request_bytes: int, block_bytes: int, held_bytes: int) -> None:
    pool = Pool()
    block = pool.allocate(request_bytes)
    assert (block.size, pool.reserved_bytes) == (block_bytes, held_bytes)


def test_a_large_block_is_cut_only_when_more_than_a_mebibyte_is_left() -> None:
    pool = Pool()
    pool.free(pool.allocate(30 * MIB))
    assert pool.allocate(29 * MIB).size == 30 * MIB
    pool.free(pool.allocate(50 * MIB))
    assert pool.allocate(40 * MIB).size == 40 * MIB
    assert pool.reserved_bytes == 80 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    pool = Pool()
    large, small = pool.allocate(64 * MIB), pool.allocate(32 * MIB)
    pool.free(large)
    pool.free(small)
    assert pool.allocate(31 * MIB) is small


def test_streams_and_sizes_do_not_share() -> None:
    pool = Pool()
    pool.on_stream(1)
    pool.free(pool.allocate(64 * MIB))
    pool.on_stream(2)
    pool.allocate(64 * MIB)
    pool.on_stream(1)
    pool.allocate(512)
    assert pool.reserved_bytes == 130 * MIB


def test_a_block_is_free_when_nobody_holds_it() -> None:
    pool = Pool()
    block = pool.allocate(32 * MIB)
    block.holders += 1
    pool.free(block)
    assert pool.allocated_bytes == 32 * MIB
    pool.free(block)
    assert pool.allocated_bytes == 0 and pool.allocate(32 * MIB) is block


def test_only_whole_segments_go_back() -> None:
    pool = Pool()
    kept, gone = pool.allocate(4 * MIB), pool.allocate(32 * MIB)
    pool.free(pool.allocate(4 * MIB))
    pool.free(gone)
    pool.release_cached()
    assert (pool.reserved_bytes, kept.size) == (20 * MIB, 4 * MIB)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2**26), st.integers(0, 2), st.booleans()), min_size=1, max_size=120
)


@given(REQUESTS)
def test_blocks_never_overlap_and_everything_comes_back(requests: list[tuple[int, int, bool]]) -> None:
    pool = Pool()
    alive: list[Block] = []
    for size, stream, release in requests:
        if release and alive:
            pool.free(alive.pop(size % len(alive)))
            continue
        pool.on_stream(stream)
        block = pool.allocate(size)
        assert rounded(size) <= block.size <= segment_bytes(rounded(size)) + MIB
        alive.append(block)
        places = sorted((each.place, each.place + each.size) for each in alive)
        assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False))
        assert pool.allocated_bytes == sum(each.size for each in alive) <= pool.reserved_bytes
    for block in alive:
        pool.free(block)
    assert pool.allocated_bytes == 0
    pool.release_cached()
    assert pool.reserved_bytes == 0


@given(st.integers(1, 2**28))
def test_the_end_of_a_block_is_what_a_fresh_pool_leaves_there(size: int) -> None:
    size = rounded(size)
    pool = Pool()
    # As many as a shared segment holds: the end is the last one's, and each has its part of it.
    count = 20 * MIB // size if MIB < size < 10 * MIB else 1
    blocks = [pool.allocate(size) for _ in range(count)]
    left = sum(block.size for block in blocks) - count * size
    assert left // count == block_end(size)


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=40), st.integers(1, 40 * MIB))
def test_what_only_passes_leaves_what_allocating_and_freeing_leave(
    asked: list[tuple[int, bool]], passing: int
) -> None:
    pools = Pool(), Pool()
    for pool in pools:
        given_out = [(pool.allocate(size), stays) for size, stays in asked]
        for block, stays in given_out:
            if not stays:
                pool.free(block)
    pools[0].passing(passing)
    pools[1].free(pools[1].allocate(passing))
    for pool in pools:  # a later request meets the same free blocks
        pool.allocate(passing // 2 + 1)
    told = [
        (pool.allocated_bytes, pool.peak_allocated_bytes, pool.reserved_bytes, pool.peak_reserved_bytes)
        for pool in pools
    ]
    assert told[0] == told[1]
