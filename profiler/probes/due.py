"""Which steps are looked at closely, and which of the others have the borders between their phases marked."""

from __future__ import annotations

import math
from typing import NamedTuple

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


class Alike(NamedTuple):
    """Steps that follow each other."""

    marked: bool
    """Whether their borders are marked."""
    until: float
    """The first after them."""


def alike_from(step: int, until: float, every: int) -> Alike:
    """Those from `step` on and before `until` that are as it is, where of `every` steps one is marked: those
    whose number it divides, so that ranks mark the same ones."""
    if every == 1:
        return Alike(marked=True, until=until)
    if step % every == 0:
        return Alike(marked=True, until=step + 1)
    return Alike(marked=False, until=min(until, (step // every + 1) * every))
