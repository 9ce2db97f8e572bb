"""The table of hosts: thousands of rows, of which only those in sight are painted."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message

from llmtop.profiler.fleet.overview import HostRow
from llmtop.tui.feeds.fleetview import HOST_MARKS
from llmtop.tui.widgets.columns import Order
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.hostcolumns import (
    HostColumn,
    note_cells,
    padded,
    shown_columns,
)
from llmtop.tui.widgets.paint import fit, harmless
from llmtop.tui.widgets.painted import Painted

_WHEEL_ROWS = 3
NOTE_STYLES = {"critical": "$text-error", "warning": "$text-warning", "info": "$muted", "": "$muted"}


class HostTable(Vertical, can_focus=True):
    """Keeps its cursor on its host while rows come, go and change places."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open", key_display="⏎"),
        Binding("up", "move(-1)", "", show=False),
        Binding("down", "move(1)", "", show=False),
        Binding("pageup", "page(-1)", "", show=False),
        Binding("pagedown", "page(1)", "", show=False),
        Binding("home", "end(-1)", "", show=False),
        Binding("end", "end(1)", "", show=False),
    ]

    class Opened(Message):
        """A person wants to see the host under the cursor."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self) -> None:
        super().__init__()
        self.rows: tuple[HostRow, ...] = ()
        """In their order."""
        self.order: Order | None = None
        self.chosen = ""
        """Name of the host under the cursor."""
        self._at = self._top = 0
        self._head, self._body = Painted(), Painted()

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._body

    def show(self, rows: tuple[HostRow, ...], order: Order | None) -> None:
        self.rows, self.order = rows, order
        found = next((at for at, row in enumerate(rows) if row.name == self.chosen), None)
        # Until somebody has moved it, the cursor stays on the worst.
        self._go(found if found is not None and self.chosen else self._at, keep_name=bool(self.chosen))

    def choose(self, name: str) -> None:
        self.chosen = name
        self.show(self.rows, self.order)

    @property
    def row(self) -> HostRow | None:
        """Under the cursor."""
        return self.rows[self._at] if self._at < len(self.rows) else None

    def on_resize(self) -> None:
        self._go(self._at, keep_name=bool(self.chosen))

    @property
    def _page(self) -> int:
        return max(1, self.content_size.height - 1)

    def _go(self, at: int, *, keep_name: bool = True) -> None:
        self._at = min(max(at, 0), max(0, len(self.rows) - 1))
        row = self.row
        if keep_name and row is not None:
            self.chosen = row.name
        last = max(0, len(self.rows) - self._page)
        self._top = min(max(self._top, self._at - self._page + 1), self._at, last)
        self._paint()

    def action_move(self, by: int) -> None:
        self._go(self._at + by)

    def action_page(self, by: int) -> None:
        self._go(self._at + by * self._page)

    def action_end(self, side: int) -> None:
        self._go(len(self.rows) if side > 0 else 0)

    def action_open(self) -> None:
        if self.row is not None:
            self.post_message(self.Opened(self.row.name))

    def on_mouse_scroll_down(self) -> None:
        self._go(self._at + _WHEEL_ROWS)

    def on_mouse_scroll_up(self) -> None:
        self._go(self._at - _WHEEL_ROWS)

    def on_click(self, event: events.Click) -> None:
        # An event that comes up from the rows tells where in them it was.
        at = self._top + event.screen_y - self.content_region.y - 1
        if not self._top <= at < len(self.rows):
            return
        again = at == self._at and bool(self.chosen)
        self._go(at)
        if again:
            self.action_open()

    # --- painting --------------------------------------------------------------------------------

    def _paint(self) -> None:
        width = self.content_size.width
        if width <= 0:
            return
        columns = shown_columns(width)
        self._head.paint(_head(columns, self.order, width), width)
        shown = self.rows[self._top : self._top + self._page]
        lines = [_line(row, columns, width, chosen=self._top + n == self._at) for n, row in enumerate(shown)]
        nobody = Content.styled(" no host holds these words; Esc shows all", "$muted")
        self._body.paint(Content("\n").join(lines) if lines else nobody, width)


def _head(columns: tuple[HostColumn, ...], order: Order | None, width: int) -> Content:
    titles = [
        padded(
            column, column.title + (order.mark if order is not None and order.title == column.title else "")
        )
        for column in columns
    ]
    words = "worst first" if order is None else ""
    return Content.styled(fit(" " + " ".join(titles) + " " + words, width), "$muted")


def _line(row: HostRow, columns: tuple[HostColumn, ...], width: int, *, chosen: bool) -> Content:
    cells: list[tuple[str, str]] = [("▸" if chosen else " ", "$accent")]
    for column in columns:
        style = f"${HOST_MARKS[row.status][2]}" if column.title == "state" else ""
        cells.append((padded(column, harmless(column.text(row))) + " ", style))
    cells.append((fit(harmless(row.note), note_cells(columns, width)), NOTE_STYLES[row.severity]))
    line = Content.assemble(*cells)
    return line.stylize("bold on $primary 30%") if chosen else line
