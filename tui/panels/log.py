"""What the job itself wrote: the newest lines of one rank's log, or of the supervisor's."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive

from llmtop.tui.view import ENDED, LogText, RunView
from llmtop.tui.widgets.paint import lines, wrapped
from llmtop.tui.widgets.panel import Panel


class LogPanel(Panel):
    """Follows the end of the log until a person scrolls up; `f` follows again."""

    TITLE = "Log"
    KEY = "8"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "turn(-1)", "Log before", show=False),
        Binding("right", "turn(1)", "Next log", show=False),
        Binding("f", "follow", "Follow", show=False),
    ]

    log_text: reactive[LogText | None] = reactive(None)

    class SourceTurned(Message):
        """A person wants the next (1) or the previous (-1) log."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    def headline(self, view: RunView) -> str:
        shown = self.log_text
        if shown is None:
            return ""
        if not self.zoomed:
            return shown.source
        return f"{shown.source}  {shown.total_lines} lines  ← → other logs  f end"

    def draw(self, view: RunView, width: int, height: int) -> Content:
        shown = self.log_text
        if shown is None or not shown.lines:
            return Content.styled(_nothing(view, shown), "$muted")
        if self.zoomed:
            return lines([Content(line) for line in shown.lines])
        # Wrapped, as the newest figures stand at the end of a line.
        rows = [row for line in shown.lines[-max(height, 1) :] for row in wrapped(line, width)]
        return lines([Content(row) for row in rows[-max(height, 1) :]])

    def watch_zoomed(self) -> None:
        # An anchored area stays at its end until a person scrolls away from it.
        self.anchor(self.zoomed)
        super().watch_zoomed()

    def watch_log_text(self) -> None:
        self.repaint()

    def action_turn(self, by: int) -> None:
        self.post_message(self.SourceTurned(by))

    def action_follow(self) -> None:
        self.anchor()


def _nothing(view: RunView, shown: LogText | None) -> str:
    """Of an empty log, which is how a good one of most ranks looks."""
    source = shown.source if shown is not None else "the log"
    words = f"{source} wrote nothing" if view.state.status in ENDED else f"{source} has written nothing yet"
    return words + ("; the steps are in the log of rank 0" if source not in ("the log", "rank 0") else "")
