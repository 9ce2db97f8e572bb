"""Text that its owner paints: drawn and laid out again only when that changes something."""

from __future__ import annotations

from textual.app import RenderResult
from textual.content import Content
from textual.geometry import Region
from textual.widgets import Static


class Painted(Static):
    """Never measures itself: the height is said with the text.

    A measurement that began before the text came can otherwise win, and the area stays one row high.
    """

    def __init__(self, text: str = "", *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(Content(text), markup=False, id=id, classes=classes)
        self.painted: Content | None = None
        self._painted_width = 0
        self._rows = -1

    def paint(self, content: Content, width: int) -> None:
        """Show `content`, wrapped to `width` columns."""
        before = self.painted if width == self._painted_width else None
        if before is not None and before.is_same(content):
            return
        self.painted, self._painted_width = content, width
        rows = content.get_height(self.styles.get_rules(), width) if content else 0
        if rows != self._rows:
            self._rows, before = rows, None
            self.styles.height = rows
        changed = _changed_rows(before, content, width) if before is not None else None
        # Of a row that is painted anew every cell goes to the terminal, so the others are left alone.
        self.refresh(*(Region(0, row, width, 1) for row in changed or ()))

    def render(self) -> RenderResult:
        return self.painted if self.painted is not None else super().render()


def _changed_rows(before: Content, after: Content, width: int) -> list[int] | None:
    """Rows that differ; None where a row is not a line of the text, or nothing can be left alone."""
    old, new = (text.split("\n", allow_blank=True) for text in (before, after))
    if len(old) != len(new) or any(line.cell_length > width for line in (*old, *new)):
        return None
    pairs = enumerate(zip(old, new, strict=True))
    return [row for row, (first, second) in pairs if not first.is_same(second)]
