"""A figure of plotext's, as Textual's content.

textual-plotext lets rich read the escape sequences of what plotext has drawn, each of them anew, into a style
of its own: half as long again as to draw it. Here a sequence is read when it is met first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text
from textual.app import RenderResult
from textual.content import Content, Span
from textual_plotext import PlotextPlot

_PIECES = re.compile(r"((?:\x1b\[[\d;]*m)*)([^\x1b]+)")
"""A text, and all the sequences before it: plotext ends each piece with a reset."""


class Figure(PlotextPlot):  # type: ignore[misc]  # whose types nobody has written
    """The same to look at."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[object, str], Sequence[Span]] = {}
        """What a sequence means: the spans of one character behind it, by theme."""

    def render(self) -> RenderResult:
        """As its base does it, but for the reading of the sequences."""
        width, height = self.size
        self.plt.plotsize(width, height)
        self.plt._set_size(width, height)
        self.plt.theme(self._get_plotext_theme_name(self.app.theme))
        return self.coloured(self.plt.build())

    def coloured(self, drawn: str) -> Content:
        """A text with escape sequences as content."""
        text, spans = "", []
        for codes, piece in _PIECES.findall(drawn):
            start, text = len(text), text + piece
            spans += [Span(start, len(text), span.style) for span in self._meaning(codes)]
        return Content(text.removesuffix("\n"), spans)

    def _meaning(self, codes: str) -> Sequence[Span]:
        key = self.app.ansi_theme, codes
        if key not in self._known:
            self._known[key] = Content.from_rich_text(Text.from_ansi(f"{codes}x")).spans
        return self._known[key]
