"""Which steps of a process are looked at more closely than others."""

from __future__ import annotations

import math

ALWAYS_CLASSIFIED = 2
"""The first steps of each process: the optimizer's states are there from the second on."""
ALWAYS_MARKED = 20
"""Steps of each process, and after each change, whose borders are marked however short they are."""


def is_classified(step: int, every: int, first_step: int = 1) -> bool:
    """Whether a step's tensors are counted: in the first two of a process, which began at `first_step`, and
    every so many."""
    return is_first(step, first_step) or (every > 0 and step % every == 0)


def next_classified(step: int, every: int, first_step: int) -> float:
    """The first after `step` whose tensors are counted."""
    if is_first(step + 1, first_step):
        return step + 1
    return (step // every + 1) * every if every > 0 else math.inf


def is_first(step: int, first_step: int) -> bool:
    """Whether it is one of the first of a process, which began at `first_step`."""
    return 0 <= step - first_step < ALWAYS_CLASSIFIED
