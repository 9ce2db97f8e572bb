"""What a panel says of a run, without the widget that shows it: a title row and a text."""

from __future__ import annotations

from typing import ClassVar

from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content, cell_len

_TITLE_EDGE_CELLS = 5
"""Around a title: the border's own cells at both sides, and a space after the words."""


class Picture:
    """In the overview it tells what fits a few rows; zoomed, over the whole screen, everything."""

    TITLE: ClassVar[str] = ""
    KEY: ClassVar[str] = ""
    """Opens the panel over the whole screen."""

    zoomed: bool = False

    def draw(self, view: RunView, width: int, height: int) -> Content:
        """The body for `width` columns; `height` rows are visible without scrolling."""
        raise NotImplementedError

    def headline(self, view: RunView) -> str | tuple[str, ...]:
        """A few words for the title row, such as the newest value; of several the first that fits."""
        return ""

    def title(self, view: RunView, width: int) -> Content:
        """For the title row of that width: a headline is shown whole or not at all."""
        headline = self.headline(view)
        ways = (headline,) if isinstance(headline, str) else headline
        room = width - len(f" {self.KEY} {self.TITLE}  ") - _TITLE_EDGE_CELLS
        return self.titled(next((words for words in ways if cell_len(words) <= room), ""))

    def titled(self, headline: str) -> Content:
        told = (f" {headline} ", "$muted") if headline else ""
        return Content.assemble((f" {self.KEY} ", "$accent"), (f"{self.TITLE} ", "bold"), told)
