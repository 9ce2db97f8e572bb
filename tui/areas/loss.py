"""The panel of the loss with its plots: the loss of each step; opened, all that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar, NamedTuple

from textual.app import ComposeResult

from llmtop.profiler.fold.series import Series
from llmtop.tui.panels.loss import LossPanel
from llmtop.tui.widgets.curves import BLUE, GREEN, ORANGE, RED, VIOLET, Curve
from llmtop.tui.widgets.panel import Panel
from llmtop.tui.widgets.plot import LinePlot

_FEWEST_PLOT_ROWS = 5


class _Column(NamedTuple):
    """One curve over the steps."""

    name: str
    words: str
    colour: tuple[int, int, int]


_COLUMNS: tuple[_Column, ...] = (
    _Column("losses", "loss", BLUE),
    _Column("learning_rates", "learning rate", GREEN),
    _Column("grad_norms", "gradient norm", VIOLET),
    _Column("loss_scales", "loss scale", ORANGE),
)


class LossArea(LossPanel, Panel):
    DEFAULT_CSS: ClassVar[str] = """
    LossArea.zoomed LinePlot { border-top: blank; border-title-align: left; border-title-color: $muted; }
    """

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield _plot(_COLUMNS[0])

    def watch_zoomed(self) -> None:
        # The others are of the opened panel alone: the first screen does not wait for them.
        if self.zoomed and len(self.query(LinePlot)) == 1:
            self.mount_all([_plot(column) for column in _COLUMNS[1:]])
        super().watch_zoomed()

    def plot(self, series: Series, rows: int) -> None:
        shown = {column.name: _known(series.steps, getattr(series, column.name)) for column in _COLUMNS}
        drawn = [column for column in _COLUMNS if len(shown[column.name][0]) > 1]
        room = rows // max(1, len(drawn))
        for column, plot in zip(_COLUMNS, self.query(LinePlot), strict=False):
            steps, values = shown[column.name]
            plot.display = len(steps) > 1 and (column.name == "losses" or self.zoomed)
            plot.styles.height = max(_FEWEST_PLOT_ROWS, room) if self.zoomed else "1fr"
            if plot.display:
                curves = [Curve(column.colour, steps, values)]
                if column.name == "losses" and self.zoomed:
                    curves.append(_skipped_marks(series))
                plot.show(curves, x_axis=not self.zoomed or column is drawn[-1])


def _plot(column: _Column) -> LinePlot:
    plot = LinePlot(id=f"plot-{column.name.replace('_', '-')}")
    plot.border_title = column.words
    plot.display = False
    return plot


def _known(
    steps: Sequence[int], values: Sequence[float | None]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Steps and values where there is one."""
    pairs = [
        (float(step), value)
        for step, value in zip(steps, values, strict=True)
        if value is not None and isfinite(value)
    ]
    return tuple(step for step, _ in pairs), tuple(value for _, value in pairs)


def _skipped_marks(series: Series) -> Curve:
    """A cross on the loss of each step that changed nothing."""
    rows = zip(series.steps, series.losses, series.skipped, strict=True)
    marked = [(float(step), loss) for step, loss, skipped in rows if skipped and loss is not None]
    return Curve(RED, tuple(step for step, _ in marked), tuple(loss for _, loss in marked), dots=True)
