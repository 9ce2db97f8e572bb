"""The panel of steps with its plot."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult

from llmtop.tui.panels.steps import StepsPanel
from llmtop.tui.widgets.curves import Curve
from llmtop.tui.widgets.panel import Panel
from llmtop.tui.widgets.plot import LinePlot


class StepsArea(StepsPanel, Panel):
    DEFAULT_CSS: ClassVar[str] = "StepsArea.zoomed LinePlot { min-height: 8; }"

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield LinePlot()

    def plot(self, curves: list[Curve]) -> None:
        plot = self.query_one(LinePlot)
        plot.display = bool(curves)
        if curves:
            plot.show(curves)
