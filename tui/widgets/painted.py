"""Text that its owner paints: drawn and laid out again only when that changes something."""

from __future__ import annotations

from textual.content import Content
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
        if self.painted is not None and self.painted.is_same(content) and width == self._painted_width:
            return
        self.painted, self._painted_width = content, width
        rows = content.get_height(self.styles.get_rules(), width) if content else 0
        if rows != self._rows:
            self._rows = rows
            self.styles.height = rows
        self.update(content, layout=False)
