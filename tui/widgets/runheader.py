"""The top of the monitor, painted anew each second at least."""

from __future__ import annotations

import time
from collections.abc import Callable

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.reactive import reactive

from llmtop.tui.feeds.owncost import CostMeter
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.headrows import head_rows
from llmtop.tui.widgets.painted import Painted

TICK_SECONDS = 1.0
_VIEWS_SECONDS = 1.5 * TICK_SECONDS
"""Where views come, one comes before that."""
_EDGE_CELLS = 1


class RunHeader(Vertical):
    """Two rows while a run goes on; the second becomes its end when it has ended."""

    view: reactive[RunView | None] = reactive(None, repaint=False)

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._clock = clock
        self._rows = Painted()
        self._view_at = 0.0
        """When the newest view came, by the monotonic clock."""
        self.meter = CostMeter()

    def compose(self) -> ComposeResult:
        # As high as it will be: else everything below is laid out twice.
        self._paint(self.app.size.width - 2 * _EDGE_CELLS)
        yield self._rows

    def on_mount(self) -> None:
        self.set_interval(TICK_SECONDS, self._tick)

    def on_resize(self) -> None:
        self.repaint()

    def watch_view(self) -> None:
        self._view_at = time.monotonic()
        self.repaint()

    def repaint(self) -> None:
        self._paint(self.content_size.width)

    def _tick(self) -> None:
        """Time goes on where no view comes; where they do, the head is painted with them and not between."""
        if time.monotonic() - self._view_at >= _VIEWS_SECONDS:
            self.repaint()

    def _paint(self, width: int) -> None:
        view = self.view
        if view is None or width <= 0:
            return
        rows = head_rows(
            view,
            width,
            self._clock(),
            self.meter.cost(),
            read_only=getattr(self.app, "read_only", False),
            leads_to=getattr(self.app, "leads_to", ""),
        )
        self._rows.paint(Content("\n").join(rows), width)
