"""What the job itself wrote: one rank's log, or the supervisor's."""

from __future__ import annotations

from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.record.logmarks import of_newest_process
from llmtop.tui.feeds.view import LogText, RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import lines, wrapped
from llmtop.tui.widgets.picture import Picture


class LogPanel(Picture):
    """The newest lines of it; opened, see `tui.areas.log`."""

    TITLE = "Log"
    KEY = "8"

    log_text: LogText | None = None

    def headline(self, view: RunView) -> str | tuple[str, ...]:
        return self.log_text.source if self.log_text is not None else ""

    def draw(self, view: RunView, width: int, height: int) -> Content:
        shown = self.log_text
        if shown is None or not shown.lines:
            return Content.styled(_nothing(view, shown), "$muted")
        # Wrapped, as the newest figures stand at the end of a line.
        newest = of_newest_process(shown.lines)
        rows = [row for line in newest[-max(height, 1) :] for row in wrapped(line, width)]
        return lines([Content(row) for row in rows[-max(height, 1) :]])


def _nothing(view: RunView, shown: LogText | None) -> str:
    """Of an empty log, which is how a good one of most ranks looks."""
    source = shown.source if shown is not None else "the log"
    words = f"{source} wrote nothing" if view.state.status in ENDED else f"{source} has written nothing yet"
    return words + ("; the steps are in the log of rank 0" if source not in ("the log", "rank 0") else "")
