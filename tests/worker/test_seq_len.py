"""Another length of sequences in the middle of the data: what the position then means."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets.errors import UsageError
from llmtop.trainer.worker.data import Batches
from llmtop.trainer.worker.place import Place


def batches(seq_len: int, tokens: int = 4_000, ranks: int = 1) -> Batches:
    return Batches(
        numpy.arange(tokens, dtype=numpy.uint16),
        seq_len=seq_len,
        micro_batch=2,
        place=Place(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks),
        seed=1,
        where="test",
    )


@given(before=st.integers(2, 64), after=st.integers(2, 64), steps=st.integers(0, 300))
def test_the_share_of_the_epoch_that_was_read_stays(before: int, after: int, steps: int) -> None:
    changed = batches(before)
    for _ in range(steps):
        changed.next_micro_batch()
    old, share = changed.position, changed.position.index / changed.order.sequences
    changed.change_seq_len(after)
    assert changed.position.epoch == old.epoch
    assert changed.position.index * after >= old.index * before - (before - 1) or (
        changed.position.index == changed.order.sequences
    )
    assert changed.position.index / changed.order.sequences == pytest.approx(share, abs=0.04)
    assert changed.next_micro_batch().shape == (2, after)


@given(before=st.integers(2, 64), after=st.integers(2, 64), steps=st.integers(0, 100))
def test_a_relaunch_with_another_length_goes_on_as_a_change_on_the_way(
    before: int, after: int, steps: int
) -> None:
    changed = batches(before)
    for _ in range(steps):
        changed.next_micro_batch()
    relaunched = batches(after)
    relaunched.resume(changed.marked_position)
    changed.change_seq_len(after)
    for _ in range(3):
        assert (relaunched.next_micro_batch() == changed.next_micro_batch()).all()


def test_the_next_epoch_holds_every_sequence_once() -> None:
    changed = batches(8, tokens=80)
    changed.next_micro_batch()
    changed.change_seq_len(4)
    while changed.position.epoch == 0:
        changed.next_micro_batch()
    assert changed.position.index == 0
    rows = numpy.concatenate([changed.next_micro_batch() for _ in range(10)])
    assert sorted(rows[:, 0].tolist()) == list(range(0, 80, 4))


def test_a_text_that_is_too_short_changes_nothing() -> None:
    changed = batches(4, tokens=40, ranks=4)
    with pytest.raises(UsageError, match="are too few"):
        changed.change_seq_len(20)
    assert changed.seq_len == 4 and changed.next_micro_batch().shape == (2, 4)
