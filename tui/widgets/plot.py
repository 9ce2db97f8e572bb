"""A line plot over textual-plotext: drawn again only when its data or its size change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from textual_plotext import PlotextPlot

from llmtop.profiler.units import figures

BLUE = (122, 162, 214)
ORANGE = (217, 166, 108)
GREEN = (143, 199, 163)
VIOLET = (178, 148, 201)
RED = (224, 122, 122)
_AXIS_ROWS = 2
"""The axis of the steps and its numbers."""


class Curve(NamedTuple):
    """One line of a plot."""

    colour: tuple[int, int, int]
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    dots: bool = False
    """Marks by themselves in place of a line."""


class LinePlot(PlotextPlot):  # type: ignore[misc]  # textual_plotext is not followed by mypy
    """Braille lines over light axes; the horizontal one counts steps."""

    DEFAULT_CSS = "LinePlot { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's own name
        super().__init__(id=id)
        self._shown: tuple[Curve, ...] = ()
        self._x_axis = True

    def on_mount(self) -> None:
        self.plt.frame(False)
        self.plt.xaxes(True, False)
        self.plt.yaxes(True, False)

    def show(self, curves: Sequence[Curve], *, x_axis: bool = True) -> None:
        """Draw these in place of what is there; one plot above another needs no axis of its own."""
        wanted = tuple(curve for curve in curves if curve.xs)
        if wanted == self._shown and x_axis == self._x_axis:
            return
        self._shown, self._x_axis = wanted, x_axis
        self.plt.clear_data()
        for curve in wanted:
            if curve.dots:
                self.plt.scatter(list(curve.xs), list(curve.ys), marker="x", color=curve.colour)
            else:
                self.plt.plot(list(curve.xs), list(curve.ys), marker="braille", color=curve.colour)
        self._set_ticks()
        self.refresh()

    def on_resize(self) -> None:
        self._set_ticks()
        self.refresh()

    def _set_ticks(self) -> None:
        if not self._shown:
            return
        xs = [x for curve in self._shown for x in (curve.xs[0], curve.xs[-1])]
        ys = [y for curve in self._shown for y in curve.ys]
        steps = sorted({round(x) for x in _spread(min(xs), max(xs), 2 if self.size.width < 50 else 4)})
        self.plt.xaxes(self._x_axis, False)
        shown = steps if self._x_axis else []
        self.plt.xticks(shown, [str(step) for step in shown])
        levels = _spread(min(ys), max(ys), 1 if self.size.height < 5 else 2 if self.size.height < 12 else 4)
        if self.size.height - _AXIS_ROWS * self._x_axis < 2:
            # Of several on one row any one may be drawn.
            levels = levels[-1:]
        self.plt.yticks(levels, [figures(level) for level in levels])


def _spread(low: float, high: float, gaps: int) -> list[float]:
    """Ticks at both ends and at equal distances between."""
    if high <= low:
        return [low]
    return [low + (high - low) * number / gaps for number in range(gaps + 1)]
