"""A text that somebody asked for, over the screen."""

from __future__ import annotations

from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.sheet import Sheet


class TextSheet(Sheet[None]):
    """Rows are cut where they are too long: they are tables."""

    def __init__(self, title: str, text: str) -> None:
        super().__init__(title)
        self._text = text

    def text(self, width: int) -> Content:
        return Content("\n".join(harmless(row)[:width] for row in self._text.splitlines()))
