"""Which steps of a process are looked at more closely than others."""

from __future__ import annotations

import math

from msgspec import Struct

ALWAYS_CLASSIFIED = 2
"""The first steps of each process: the optimizer's states are there from the second on."""
ALWAYS_MARKED = 20
"""Steps of each process, and after each change, whose borders are all marked."""
BORDERS_EVERY = 5
"""On CUDA the borders between phases are marked in one of so many later steps, those whose number it divides:
on caches that the training has swept an event takes 20 to 30 us (`benchmarks/probe_calls.py`)."""


class Marking(Struct, frozen=True):
    """In which steps the borders between phases are marked.

    By their numbers alone, so that all ranks mark the same ones and tell of the same time."""

    every: int = 1
    until: int = 0
    """All steps before this one are marked."""

    def is_marked(self, step: int) -> bool:
        return step < self.until or step % self.every == 0


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
