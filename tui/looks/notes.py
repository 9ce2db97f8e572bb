"""Notes of the app: in few rows where they hide no figure, and gone when a person asks."""

from __future__ import annotations

from textual import events
from textual.app import App
from textual.notifications import SeverityLevel
from textual.widgets import Input

from llmtop.tui.widgets.content import cell_len

_EDGE_CELLS = 4
"""Of a note: its border, and the room on both sides."""
_TYPING = "-typing"


class Noting(App[int]):
    """Notes lie on the row of the keys and, if long, rise over what is above it; while a person types, for
    which fields are there, they lie at the top."""

    NOTIFICATION_TIMEOUT = 3
    """Seconds: a note lies over what is shown."""

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """The title stands before the message where both have room in one row."""
        row = f"{title}: {message}"
        if title and not markup and "\n" not in row and cell_len(row) + _EDGE_CELLS <= self.size.width:
            message, title = row, ""
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=markup)

    def clear_notifications(self) -> None:
        super().clear_notifications()
        # What held a note keeps its rows otherwise, and the next note stands above them.
        for holder in self.screen.query("ToastHolder") if self.screen_stack else ():
            holder.remove()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        event.widget.screen.set_class(isinstance(event.widget, Input), _TYPING)

    async def on_event(self, event: events.Event) -> None:
        """Esc takes away notes that lie over the screen; what it does there, it does where there are none."""
        is_escape = isinstance(event, events.Key) and event.key == "escape" and not event.is_forwarded
        if is_escape and self.screen_stack and self.screen.query("Toast"):
            self.clear_notifications()
            return
        await super().on_event(event)
