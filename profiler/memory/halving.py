"""The next smaller and the next larger micro-batch at the same global batch."""

from __future__ import annotations


def halved(micro_batch: int, grad_accum: int) -> tuple[int, int] | None:
    """Half the micro-batch with twice the accumulation; where it is odd, the largest size below half that
    keeps the sequences of a step. None where a micro-batch is one sequence already."""
    if micro_batch == 1:
        return None
    whole = micro_batch * grad_accum
    size = micro_batch // 2
    while whole % size:
        size -= 1
    return size, whole // size


def doubled(micro_batch: int, grad_accum: int) -> tuple[int, int] | None:
    """Twice the micro-batch with half the accumulation; where that is odd, the smallest size above twice that
    keeps the sequences of a step. None where nothing is accumulated."""
    if grad_accum == 1:
        return None
    whole = micro_batch * grad_accum
    times = grad_accum // 2
    while whole % times:
        times -= 1
    return whole // times, times
