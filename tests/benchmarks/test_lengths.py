"""Orders of many lengths, and what an allocator comes to hold of them."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.accuracy.lengths import (
    DATA,
    DISTRIBUTIONS,
    MANY_LENGTHS,
    SEEDS,
    Lengths,
    held_bytes,
    likely_bytes,
    likely_error_bytes,
    order,
    reserved_of,
)
from benchmarks.rows import read_rows
from tests.profiler.test_memory import make

TOLD = Lengths(mean=3234.4, deviation=2547.5, least=91, largest=19548, samples=4959)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_have_the_mean_and_deviation_that_are_told(name: str) -> None:
    found = [*order(TOLD, TOLD.largest, DISTRIBUTIONS[name], 1)]
    assert len(found) == TOLD.samples
    assert statistics.fmean(found) == pytest.approx(TOLD.mean, rel=0.05)
    assert statistics.stdev(found) == pytest.approx(TOLD.deviation, rel=0.12)
    short = [*order(TOLD, 2048, DISTRIBUTIONS[name], 1)]
    assert short == [length for length in found if length <= 2048]


def test_many_lengths_come_to_hold_more_than_the_longest() -> None:
    spec = make("smollm2-135m", "a100-80gb", seq_len=2048, lora_rank=8, attention="flash_attention_2")
    longest = held_bytes(spec, [2048] * 24)
    growing = [2048 - 37 * at for at in range(23, -1, -1)]
    assert held_bytes(spec, growing) > 1.1 * longest
    # Where the longest came first, every later one finds room.
    assert held_bytes(spec, growing[::-1]) == longest


def test_every_row_of_many_lengths_was_simulated_in_every_order() -> None:
    rows = [row for row in read_rows(DATA / "published.jsonl") if MANY_LENGTHS in row["differs"]]
    assert len(rows) == 8
    for row in rows:
        found = reserved_of(row["id"])
        assert len(found) == len(DISTRIBUTIONS) * len(SEEDS)
        assert found[0] <= (likely_bytes(row["id"]) or 0) <= found[-1]
        # Of so many figures the median is certain to a few percent, whatever their order alone takes.
        assert 0 < (likely_error_bytes(row["id"]) or 0) < 0.04 * row["measured_bytes"]
    assert likely_bytes("LG001") is likely_error_bytes("LG001") is None
