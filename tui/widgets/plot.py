"""A line plot over textual-plotext: drawn again only when its data or its size change.

plotext takes a third as long to load as all the rest: the first plot comes a moment after the first screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.app import RenderResult
from textual.widget import Widget

from llmtop.profiler.units import figures
from llmtop.tui.widgets.curves import Curve

if TYPE_CHECKING:
    from llmtop.tui.widgets.figure import Figure

_AXIS_ROWS = 2
"""The axis of the steps and its numbers."""


class LinePlot(Widget):
    """Braille lines over light axes; the horizontal one counts steps."""

    DEFAULT_CSS = "LinePlot { width: 1fr; height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's own name
        super().__init__(id=id)
        self._shown: tuple[Curve, ...] = ()
        self._x_axis = True
        self._figure: Figure | None = None

    def render(self) -> RenderResult:
        return ""

    def show(self, curves: Sequence[Curve], *, x_axis: bool = True) -> None:
        """Draw these in place of what is there; one plot above another needs no axis of its own."""
        wanted = tuple(curve for curve in curves if curve.xs)
        if wanted == self._shown and x_axis == self._x_axis:
            return
        self._shown, self._x_axis = wanted, x_axis
        if self._figure is not None:
            self._draw(self._figure)
        else:
            self.call_after_refresh(self._open)

    def _open(self) -> None:
        if self._figure is not None or not self.is_attached:
            return
        from llmtop.tui.widgets.figure import Figure

        self._figure = figure = Figure()
        figure.plt.frame(False)
        figure.plt.yaxes(True, False)
        self.mount(figure)
        self._draw(figure)

    def _draw(self, figure: Figure) -> None:
        figure.plt.clear_data()
        for curve in self._shown:
            if curve.dots:
                figure.plt.scatter(list(curve.xs), list(curve.ys), marker="x", color=curve.colour)
            else:
                figure.plt.plot(list(curve.xs), list(curve.ys), marker="braille", color=curve.colour)
        self._set_ticks(figure)
        figure.refresh()

    def on_resize(self) -> None:
        if self._figure is not None:
            self._set_ticks(self._figure)
            self._figure.refresh()

    def _set_ticks(self, figure: Figure) -> None:
        if not self._shown:
            return
        xs = [x for curve in self._shown for x in (curve.xs[0], curve.xs[-1])]
        ys = [y for curve in self._shown for y in curve.ys]
        steps = sorted({round(x) for x in _spread(min(xs), max(xs), 2 if self.size.width < 50 else 4)})
        figure.plt.xaxes(self._x_axis, False)
        shown = steps if self._x_axis else []
        figure.plt.xticks(shown, [str(step) for step in shown])
        levels = _spread(min(ys), max(ys), 1 if self.size.height < 5 else 2 if self.size.height < 12 else 4)
        if self.size.height - _AXIS_ROWS * self._x_axis < 2:
            # Of several on one row any one may be drawn.
            levels = levels[-1:]
        figure.plt.yticks(levels, [figures(level) for level in levels])


def _spread(low: float, high: float, gaps: int) -> list[float]:
    """Ticks at both ends and at equal distances between."""
    if high <= low:
        return [low]
    return [low + (high - low) * number / gaps for number in range(gaps + 1)]
