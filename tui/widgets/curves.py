"""What a plot shows, without the plot."""

from __future__ import annotations

from typing import NamedTuple

BLUE = (122, 162, 214)
ORANGE = (217, 166, 108)
GREEN = (143, 199, 163)
VIOLET = (178, 148, 201)
RED = (224, 122, 122)


class Curve(NamedTuple):
    """One line of a plot."""

    colour: tuple[int, int, int]
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    dots: bool = False
    """Marks by themselves in place of a line."""
