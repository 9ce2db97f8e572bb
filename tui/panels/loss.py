"""How the training goes: the loss of each step; opened, learning rate, gradient norm and loss scale too."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.content import Content

from llmtop.profiler.fold.series import Series
from llmtop.profiler.units import figures, format_change
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.inputrows import input_rows
from llmtop.tui.widgets.paint import lines
from llmtop.tui.widgets.panel import Panel
from llmtop.tui.widgets.plot import BLUE, GREEN, ORANGE, RED, VIOLET, Curve, LinePlot

_NAMED_SKIPS = 12
_FEWEST_PLOT_ROWS = 5
_ROOMY = 34
"""Rows of a screen from which on inputs are told in full above the plots."""


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


class LossPanel(Panel):
    TITLE = "Loss"
    KEY = "3"
    DEFAULT_CSS: ClassVar[str] = """
    LossPanel.zoomed LinePlot { border-top: blank; border-title-align: left; border-title-color: $muted; }
    """

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield _plot(_COLUMNS[0])

    def watch_zoomed(self) -> None:
        # The others are of the opened panel alone: the first screen does not wait for them.
        if self.zoomed and len(self.query(LinePlot)) == 1:
            self.mount_all([_plot(column) for column in _COLUMNS[1:]])
        super().watch_zoomed()

    def headline(self, view: RunView) -> str:
        first, last = view.state.first_loss, view.state.last_loss
        if last is None:
            return ""
        if first is None or first <= 0:
            return f"{last:.3f}"
        return f"{first:.3f} → {last:.3f}  {format_change((last / first - 1) * 100)}"

    def draw(self, view: RunView, width: int, height: int) -> Content:
        series = view.state.series
        shown = {column.name: _known(series.steps, getattr(series, column.name)) for column in _COLUMNS}
        text = self._text(view, width, height)
        drawn = [column for column in _COLUMNS if len(shown[column.name][0]) > 1]
        room = (height - text.get_height({}, width)) // max(1, len(drawn))
        for column, plot in zip(_COLUMNS, self.query(LinePlot), strict=False):
            steps, values = shown[column.name]
            plot.display = len(steps) > 1 and (column.name == "losses" or self.zoomed)
            plot.styles.height = max(_FEWEST_PLOT_ROWS, room) if self.zoomed else "1fr"
            if plot.display:
                curves = [Curve(column.colour, steps, values)]
                if column.name == "losses" and self.zoomed:
                    curves.append(_skipped_marks(series))
                plot.show(curves, x_axis=not self.zoomed or column is drawn[-1])
        return text

    def _text(self, view: RunView, width: int, height: int) -> Content:
        series = view.state.series
        known = sum(loss is not None for loss in series.losses)
        if not series.steps or not (known or self.zoomed):
            elsewhere = series.steps and view.state.first_rank
            words = "rank 0 tells it, on another host" if elsewhere else "no step has finished yet"
            return Content.styled(words, "$muted")
        newest = Content.assemble(*_newest(view))
        if not self.zoomed:
            return Content("") if known > 1 else newest
        # A loss says nothing without what was learnt from what.
        inputs = input_rows(view.spec, brief=height < _ROOMY, width=width)
        return lines([newest, *_skipped_row(view), *inputs])


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


def _skipped_row(view: RunView) -> list[Content]:
    if not view.state.skipped_steps:
        return []
    series = view.state.series
    numbers = [step for step, skipped in zip(series.steps, series.skipped, strict=True) if skipped]
    named = ", ".join(map(str, numbers[-_NAMED_SKIPS:]))
    more = "the last of them " if view.state.skipped_steps > len(numbers[-_NAMED_SKIPS:]) else ""
    words = f"{view.state.skipped_steps} of {view.state.steps_made} steps skipped (x in the plot)"
    return [Content.styled(words + (f": {more}{named}" if named else ""), "$text-warning")]


def _newest(view: RunView) -> list[str | tuple[str, str]]:
    """The newest figures in one row."""
    series, state = view.state.series, view.state
    rate, norm = series.learning_rates[-1], series.grad_norms[-1]
    last = state.first.last_step if state.first is not None else None
    scale = last.loss_scale if last is not None else None
    unknown = "n/a" if state.first_rank else "not finite"
    cells = [
        ("step", str(series.steps[-1])),
        ("loss", unknown if series.losses[-1] is None else f"{series.losses[-1]:.4f}"),
        ("learning rate", "n/a" if rate is None else f"{rate:.3g}"),
        ("gradient norm", "n/a" if norm is None else figures(norm)),
    ]
    if scale is not None:
        cells.append(("loss scale", f"{scale:g}"))
    parts: list[str | tuple[str, str]] = []
    for name, value in cells:
        parts += [(f"{name} ", "$muted"), f"{value}   "]
    return parts
