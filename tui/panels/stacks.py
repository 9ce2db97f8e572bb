"""Where each rank stands: its Python stacks as they were when a person asked."""

from __future__ import annotations

from typing import ClassVar

from textual.reactive import reactive

from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import harmless, lines
from llmtop.tui.widgets.panel import Panel


class StacksPanel(Panel):
    TITLE = "Stacks"
    KEY = "t"
    DEFAULT_CSS: ClassVar[str] = "StacksPanel { display: none; }"

    stacks: reactive[str | None] = reactive(None, repaint=False)
    """What was taken last; None while they are being taken."""

    def headline(self, view: RunView) -> tuple[str, ...]:
        return ("Python stacks of every rank; t twice takes them again", "of every rank", "")

    def watch_stacks(self) -> None:
        self.repaint()

    def draw(self, view: RunView, width: int, height: int) -> Content:
        if self.stacks is None:
            return Content.styled("asking each rank where it stands", "$muted")
        return lines([_row(harmless(row)) for row in self.stacks.splitlines()])


def _row(text: str) -> Content:
    return Content.styled(text, "bold $text-primary" if text.startswith("===") else "$foreground")
