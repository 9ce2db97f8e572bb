"""Two runs side by side: what `llmtop compare` prints, for the width of the screen."""

from __future__ import annotations

from llmtop.profiler.effects.compare import Comparison
from llmtop.tui.commands.compare import render
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.sheet import Sheet


class CompareScreen(Sheet[None]):
    def __init__(self, found: Comparison) -> None:
        super().__init__("Compare")
        self.found = found

    def text(self, width: int) -> Content:
        return Content("\n").join([Content(harmless(row)) for row in render(self.found, width)])
