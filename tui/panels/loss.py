"""How the training goes: the loss of each step; opened, learning rate, gradient norm and loss scale too."""

from __future__ import annotations

from llmtop.profiler.fold.series import Series
from llmtop.profiler.units import figures, format_change
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.inputrows import input_rows
from llmtop.tui.widgets.paint import lines
from llmtop.tui.widgets.picture import Picture

_NAMED_SKIPS = 12
_ROOMY = 34
"""Rows of a screen from which on inputs are told in full above the plots."""


class LossPanel(Picture):
    TITLE = "Loss"
    KEY = "3"

    def headline(self, view: RunView) -> str:
        first, last = view.state.first_loss, view.state.present_loss
        if last is None:
            return ""
        if first is None or first <= 0:
            return f"{last:.3f}"
        return f"{first:.3f} → {last:.3f}  {format_change((last / first - 1) * 100)}"

    def draw(self, view: RunView, width: int, height: int) -> Content:
        text = self._text(view, width, height)
        self.plot(view.state.series, height - text.get_height(width))
        return text

    def plot(self, series: Series, rows: int) -> None:
        """The curves below the text, where a widget shows them."""

    def _text(self, view: RunView, width: int, height: int) -> Content:
        series = view.state.series
        known = sum(loss is not None for loss in series.losses)
        if not series.steps or not (known or self.zoomed):
            elsewhere = series.steps and view.state.first_rank
            words = "rank 0 tells it, on another host" if elsewhere else "no step has finished yet"
            return Content.styled(words, "$muted")
        newest = Content.assemble(*_newest(view))
        if view.state.made_no_step:
            newest = Content.styled("no step has finished since it went on", "$muted")
        if not self.zoomed:
            return Content("") if known > 1 else newest
        # A loss says nothing without what was learnt from what.
        inputs = input_rows(view.spec, brief=height < _ROOMY, width=width)
        return lines([newest, *_skipped_row(view), *inputs])


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
