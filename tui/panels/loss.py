"""The loss of each step, with learning rate and gradient norm."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content

from llmtop.profiler.units import format_percent
from llmtop.tui.view import RunView
from llmtop.tui.widgets.inputrows import input_rows
from llmtop.tui.widgets.paint import lines
from llmtop.tui.widgets.panel import Panel
from llmtop.tui.widgets.plot import BLUE, Curve, LinePlot


class LossPanel(Panel):
    TITLE = "Loss"
    KEY = "3"

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield LinePlot()

    def headline(self, view: RunView) -> str:
        first, last = view.state.first_loss, view.state.last_loss
        if last is None:
            return ""
        if first is None or first <= 0:
            return f"{last:.3f}"
        return f"{first:.3f} → {last:.3f}  {format_percent((last / first - 1) * 100, signed=True, digits=0)}"

    def draw(self, view: RunView, width: int, height: int) -> Content:
        series = view.state.series
        known = [
            (step, loss) for step, loss in zip(series.steps, series.losses, strict=True) if loss is not None
        ]
        plot = self.query_one(LinePlot)
        plot.display = len(known) > 1
        plot.show([Curve(BLUE, tuple(s for s, _ in known), tuple(loss for _, loss in known))])
        if not known:
            return Content.styled("no step has finished yet", "$muted")
        if not self.zoomed and len(known) > 1:
            return Content("")
        newest = Content.assemble(*_newest(view))
        # A loss says nothing without what was learnt from what.
        return lines([newest, *input_rows(view.spec)]) if self.zoomed else newest


def _newest(view: RunView) -> list[str | tuple[str, str]]:
    """The newest figures in one row."""
    series, state = view.state.series, view.state
    rate, norm = series.learning_rates[-1], series.grad_norms[-1]
    last = state.ranks[0].last_step if 0 in state.ranks else None
    scale = last.loss_scale if last is not None else None
    cells = [
        ("step", str(series.steps[-1])),
        ("loss", "not finite" if series.losses[-1] is None else f"{series.losses[-1]:.4f}"),
        ("learning rate", "n/a" if rate is None else f"{rate:.3g}"),
        ("gradient norm", "n/a" if norm is None else f"{norm:.3g}"),
    ]
    if scale is not None:
        cells.append(("loss scale", f"{scale:g}"))
    if state.skipped_steps:
        cells.append(("skipped steps", str(state.skipped_steps)))
    parts: list[str | tuple[str, str]] = []
    for name, value in cells:
        parts += [(f"{name} ", "$muted"), f"{value}   "]
    return parts
