"""The order of training sequences: complete, shuffled, the same for every world size, resumable."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets.errors import UsageError
from llmtop.trainer.statefile import Position
from llmtop.trainer.worker.data import Batches, SequenceOrder
from llmtop.trainer.worker.place import Place


def place(rank: int, world_size: int) -> Place:
    return Place(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)


def batches(
    sequences: int, *, rank: int = 0, world_size: int = 1, micro_batch: int = 1, seed: int = 0
) -> Batches:
    tokens = numpy.arange(sequences * 4 + 3, dtype=numpy.uint16)
    return Batches(
        tokens, seq_len=4, micro_batch=micro_batch, place=place(rank, world_size), seed=seed, where="test"
    )


def first_tokens(ids: numpy.typing.NDArray[numpy.int64]) -> list[int]:
    return [int(row[0]) for row in ids]


@given(sequences=st.integers(1, 60), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_holds_every_sequence_once(sequences: int, seed: int, epoch: int) -> None:
    order = SequenceOrder(sequences, seed)
    taken = order.take(Position(epoch=epoch), sequences)
    assert sorted(taken.tolist()) == list(range(sequences))


@given(
    sequences=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    seed=st.integers(0, 3),
)
def test_the_order_does_not_depend_on_how_it_is_cut(sequences: int, sizes: list[int], seed: int) -> None:
    order = SequenceOrder(sequences, seed)
    position, pieces = Position(), []
    for size in sizes:
        pieces += order.take(position, size).tolist()
        position = order.advance(position, size)
    assert pieces == SequenceOrder(sequences, seed).take(Position(), sum(sizes)).tolist()
    assert position == Position(epoch=sum(sizes) // sequences, index=sum(sizes) % sequences)


@given(sequences=st.integers(8, 50), steps=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_world_size_reads_the_same_sequences_in_a_step(sequences: int, steps: int, seed: int) -> None:
    """Eight sequences a step: one rank of 8, two of 4, four of 2, or accumulated."""
    seen = []
    for world_size, micro_batch, micros in ((1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 1, 4), (1, 4, 2)):
        ranks = [
            batches(sequences, rank=rank, world_size=world_size, micro_batch=micro_batch, seed=seed)
            for rank in range(world_size)
        ]
        by_step = []
        for _ in range(steps):
            step = [
                row for _ in range(micros) for one in ranks for row in first_tokens(one.next_micro_batch())
            ]
            by_step.append(sorted(step))
        seen.append(by_step)
        assert len({(one.position.epoch, one.position.index) for one in ranks}) == 1
    assert all(by_step == seen[0] for by_step in seen)


@given(before=st.integers(0, 30), seed=st.integers(0, 3))
def test_a_resumed_rank_goes_on_where_it_stopped(before: int, seed: int) -> None:
    straight = batches(7, micro_batch=2, seed=seed)
    for _ in range(before):
        straight.next_micro_batch()
    resumed = batches(7, micro_batch=2, seed=seed)
    resumed.position = straight.position
    for _ in range(10):
        assert first_tokens(resumed.next_micro_batch()) == first_tokens(straight.next_micro_batch())


def test_epochs_and_seeds_differ() -> None:
    order = SequenceOrder(50, 0)
    first, second = order.take(Position(), 50).tolist(), order.take(Position(epoch=1), 50).tolist()
    assert first != second
    assert SequenceOrder(50, 1).take(Position(), 50).tolist() != first


def test_rows_are_whole_sequences_of_64_bit_ids() -> None:
    ids = batches(5, micro_batch=3).next_micro_batch()
    assert ids.shape == (3, 4) and ids.dtype == numpy.int64
    for row in ids:
        assert row[0] % 4 == 0
        assert row.tolist() == list(range(int(row[0]), int(row[0]) + 4))


def test_fewer_sequences_than_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="11 tokens are too few") as caught:
        batches(2, world_size=3)
    assert "each of 3 ranks" in str(caught.value)
