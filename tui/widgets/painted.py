"""Text that its owner paints: drawn and laid out again only when that changes something."""

from __future__ import annotations

from textual.app import RenderResult
from textual.geometry import Region
from textual.widgets import Static

from llmtop.tui.widgets.content import Content


class Painted(Static):
    """Never measures itself: the height is said with the text.

    A measurement that began before the text came can otherwise win, and the area stays one row high.
    """

    def __init__(self, text: str = "", *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(text, markup=False, id=id, classes=classes)
        self.painted: Content | None = None
        self._lines: list[Content] | None = None
        """Of what is painted, where each is a row; None where one is wrapped."""
        self._painted_width = 0
        self._rows = -1

    def paint(self, content: Content, width: int) -> None:
        """Show `content`, wrapped to `width` columns."""
        before = self.painted if width == self._painted_width else None
        if before is not None and before == content:
            return
        old, lines = self._lines, rows_of(content, width)
        self.painted, self._painted_width, self._lines = content, width, lines
        rows = content.get_height(width) if lines is None else len(lines)
        if rows != self._rows:
            self._rows, before = rows, None
            self.styles.height = rows
        changed: list[int] = []
        if before is not None and old is not None and lines is not None:
            pairs = enumerate(zip(old, lines, strict=True))
            changed = [row for row, (first, second) in pairs if first != second]
        # Of a row that is painted anew every cell goes to the terminal, so the others are left alone.
        self.refresh(*(Region(0, row, width, 1) for row in changed))

    def render(self) -> RenderResult:
        return self.painted if self.painted is not None else super().render()


def rows_of(content: Content, width: int) -> list[Content] | None:
    """The lines of the text; None where one of them takes more than a row, or is of unknown width."""
    if "\t" in content.plain:
        return None
    lines = content.rows() if content else []
    return None if any(line.cell_length > width for line in lines) else lines
