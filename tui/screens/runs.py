"""Every run there is: find, order, open, stop, compare and delete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.theme import Theme
from textual.widgets import DataTable, Input, Static

from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.asking.requests import (
    CompareAsked,
    DeleteAsked,
    MonitorAsked,
    ReplayAsked,
    ResumeWanted,
    RunsChanged,
    StopAsked,
)
from llmtop.tui.feeds.feed import RunsArrived, follow_runs
from llmtop.tui.feeds.runsfeed import RunsFeed
from llmtop.tui.feeds.view import RunRow
from llmtop.tui.keys import RUNS_KEYS, bindings
from llmtop.tui.widgets.columns import Order
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.runcolumns import (
    COLUMNS,
    RunColumn,
    holds,
    ordered,
    shown_columns,
    widths,
)
from llmtop.tui.widgets.runslist import OPEN, cells, colour_of, runs_head, titles


class RunTable(DataTable[Text]):
    """Shows in the footer what Enter does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings((OPEN,)),
        # A table goes to the first and last column; here the rows are what one moves in.
        Binding("home", "scroll_top", "", show=False),
        Binding("end", "scroll_bottom", "", show=False),
    ]


class RunsScreen(Screen[None]):
    """The start: a table that keeps its cursor on its run while it is refreshed."""

    HELP_TITLE: ClassVar[str] = "Runs"
    """Of its keys in the help."""
    BINDINGS: ClassVar[list[BindingType]] = bindings(RUNS_KEYS)

    def __init__(
        self,
        root: Path,
        feed: RunsFeed | None = None,
        rows: tuple[RunRow, ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`feed` has read `rows`, or nothing, before there was a screen."""
        super().__init__()
        self._root = root
        self._clock = clock
        self._feed = feed if feed is not None else RunsFeed(root)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self.rows = rows
        """All runs, newest first."""
        self._total = len(rows) or None
        """How many runs there are; None until the folder was looked at."""
        self.shown: tuple[RunRow, ...] = ()
        """Those that the filter leaves, in the order of the table."""
        self.order: Order | None = None
        """None: newest first."""
        self._words = ""
        self.marked: tuple[str, ...] = ()
        """At most two."""
        self._columns: tuple[RunColumn, ...] = ()
        self._heads: tuple[str, ...] = ()
        self._widths: dict[str, int] = {}
        self._painted: dict[str, tuple[str, ...]] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="runs-head", markup=False)
        yield RunTable(cursor_type="row", cell_padding=0)
        yield Static("looking for runs", id="runs-note", markup=False)
        yield Input(
            placeholder="words of an id, recipe, model, device or state", compact=True, id="runs-filter"
        )
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(RunTable).focus()
        self.app.theme_changed_signal.subscribe(self, self._recolour)
        if self._total is not None:
            self._paint()
        # What the first screen shows has been read; its painting waits for no thread.
        self.call_after_refresh(self._follow)

    def on_unmount(self) -> None:
        self._stop.set()
        self._wake.set()

    def on_screen_resume(self) -> None:
        self._wake.set()

    @work(thread=True, exclusive=True, group="feed")
    def _follow(self) -> None:
        follow_runs(self._feed, self.post_message, self._stop, self._wake)

    def _recolour(self, _: Theme) -> None:
        """Cells hold the colours that they were made with."""
        self._painted = {}
        self._paint()

    def on_resize(self) -> None:
        self._paint()

    def on_runs_changed(self, _: RunsChanged) -> None:
        self._wake.set()

    def on_runs_arrived(self, message: RunsArrived) -> None:
        self.rows = message.rows
        self._total = message.total
        known = {row.run_id for row in self.rows}
        self.marked = tuple(run_id for run_id in self.marked if run_id in known)
        self._paint()

    # --- painting --------------------------------------------------------------------------------

    def _paint(self) -> None:
        """Bring the table to `rows`, touching only what differs."""
        table = self.query_one(RunTable)
        self.shown = ordered([row for row in self.rows if holds(row, self._words)], self.order)
        width = self.size.width or self.app.size.width
        columns = shown_columns(width, self.rows)
        sizes = widths(columns, width)
        heads = titles(columns, sizes, self.order)
        if (columns, heads) != (self._columns, self._heads) or [r.run_id for r in self.shown] != list(
            self._painted
        ):
            self._columns, self._heads, self._widths = columns, heads, sizes
            self._rebuild(table)
        else:
            for row in self.shown:
                self._update(table, row)
        note = self.query_one("#runs-note", Static)
        note.display = not self.shown
        table.display = bool(self.shown)
        if self._total == 0:
            note.update(f"No runs in {self._root} yet.\n\nPress p to plan one.")
        elif self.rows and not self.shown:
            which = "No run" if len(self.rows) == self._total else "None of those read so far"
            note.update(f"{which} holds these words.\n\nEsc shows all runs.")
        self._paint_head()

    def _paint_head(self) -> None:
        head = runs_head(
            self.rows,
            len(self.shown) if self._words else None,
            total=self._total,
            read_only=getattr(self.app, "read_only", False),
            marked=self.marked,
        )
        self.query_one("#runs-head", Static).update(head)

    def _rebuild(self, table: RunTable) -> None:
        chosen = self._chosen()
        table.clear(columns=True)
        for column, head in zip(self._columns, self._heads, strict=True):
            table.add_column(Text(head), key=column.title, width=self._widths[column.title] + 1)
        self._painted = {}
        for row in self.shown:
            texts = self._texts(row)
            cells = [self._cell(row, column, text) for column, text in zip(self._columns, texts, strict=True)]
            table.add_row(*cells, key=row.run_id)
            self._painted[row.run_id] = texts
        if chosen in self._painted:
            table.move_cursor(row=list(self._painted).index(chosen), animate=False)

    def _update(self, table: RunTable, row: RunRow) -> None:
        texts = self._texts(row)
        for column, text, before in zip(self._columns, texts, self._painted[row.run_id], strict=True):
            if text != before:
                table.update_cell(row.run_id, column.title, self._cell(row, column, text))
        self._painted[row.run_id] = texts

    def _texts(self, row: RunRow) -> tuple[str, ...]:
        """Each cell as it stands there."""
        return cells(row, self._columns, self._widths, self._clock(), marked=row.run_id in self.marked)

    def _cell(self, row: RunRow, column: RunColumn, text: str) -> Text:
        role = colour_of(row, column)
        # Text and not str: a table reads markup in plain strings.
        return Text(text, style=getattr(self.app.current_theme, role) if role is not None else "")

    def _chosen(self) -> str | None:
        table = self.query_one(RunTable)
        if not self._painted or not table.is_valid_row_index(table.cursor_row):
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    # --- finding and ordering --------------------------------------------------------------------

    def action_filter(self) -> None:
        box = self.query_one("#runs-filter", Input)
        box.add_class("-open")
        box.focus()

    @on(Input.Changed, "#runs-filter")
    def _typed(self, event: Input.Changed) -> None:
        self._words = event.value
        self._paint()

    @on(Input.Submitted, "#runs-filter")
    def _filtered(self) -> None:
        if not self._words.strip():
            self.query_one("#runs-filter").remove_class("-open")
        self.query_one(RunTable).focus()

    def action_back(self) -> None:
        """One thing at a time: the filter, the marks, the order."""
        box = self.query_one("#runs-filter", Input)
        if box.has_class("-open"):
            box.value = ""
            box.remove_class("-open")
            self.query_one(RunTable).focus()
        elif self.marked:
            self.marked = ()
        else:
            self.order = None
        self._paint()

    def action_order(self, by: int) -> None:
        titles = [None, *(column.title for column in self._columns)]
        now = titles.index(self.order.title) if self.order is not None and self.order.title in titles else 0
        self._order_by(titles[(now + by) % len(titles)])

    def action_reverse(self) -> None:
        before = self.order
        # Newest first is the order of the age.
        self.order = Order("age", True) if before is None else Order(before.title, not before.large_first)
        self._paint()

    @on(DataTable.HeaderSelected)
    def _head_clicked(self, event: DataTable.HeaderSelected) -> None:
        title = event.column_key.value
        if self.order is not None and self.order.title == title:
            self.action_reverse()
        else:
            self._order_by(title)

    def _order_by(self, title: str | None) -> None:
        column = next((column for column in COLUMNS if column.title == title), None)
        self.order = None if column is None else Order(column.title, column.large_first)
        self._paint()

    # --- one run, or two -------------------------------------------------------------------------

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        row = self._readable()
        if row is not None:
            self.post_message(MonitorAsked(row.run_id))

    def _readable(self) -> RunRow | None:
        """The run under the cursor; where it cannot be read that is said."""
        row = self._row()
        if row is not None and row.problem:
            self._say(row.problem, "This run cannot be read", severe=True)
            return None
        return row

    def action_replay(self) -> None:
        row = self._readable()
        if row is not None:
            self.post_message(ReplayAsked(row.run_id))

    def action_stop(self) -> None:
        row = self._row()
        if row is None:
            return
        if row.status in ENDED:
            self._say("It has ended already.", row.name)
        else:
            self.post_message(StopAsked(self._dir(row.run_id)))

    def action_resume(self) -> None:
        row = self._readable()
        if row is None:
            return
        if row.status in ENDED:
            self.post_message(ResumeWanted(self._dir(row.run_id)))
        else:
            self._say("It goes on already.", row.name)

    def action_delete(self) -> None:
        row = self._row()
        if row is None:
            return
        if row.status in ENDED:
            self.post_message(DeleteAsked(self._dir(row.run_id)))
        else:
            self._say("It goes on: stop it first.", row.name)

    def action_mark(self) -> None:
        row = self._readable()
        if row is None:
            return
        if row.run_id in self.marked:
            self.marked = tuple(run_id for run_id in self.marked if run_id != row.run_id)
        else:
            self.marked = (*self.marked, row.run_id)[-2:]
        self._paint()

    def action_compare(self) -> None:
        row = self._readable()
        pair = self.marked
        if len(pair) < 2 and row is not None:
            pair = (*(run_id for run_id in pair if run_id != row.run_id), row.run_id)
        if len(pair) == 2:
            self.post_message(CompareAsked(self._dir(pair[0]), self._dir(pair[1])))
        else:
            told = "Mark one run with space, then press c on another one."
            if row is not None and self.marked:  # the cursor is on it
                other = "there is no other run here" if len(self.rows) < 2 else "press c on another one"
                told = f"{row.short_id} is marked, and {other}."
            self._say(told, "Compare two runs")

    def action_refresh(self) -> None:
        self._feed.read_anew()
        self._wake.set()

    def _say(self, text: str, title: str, *, severe: bool = False) -> None:
        self.app.clear_notifications()
        self.notify(
            harmless(text), title=harmless(title), severity="error" if severe else "information", markup=False
        )

    def _dir(self, run_id: str) -> RunDir:
        return RunDir(self._root / run_id)

    def _row(self) -> RunRow | None:
        chosen = self._chosen()
        return next((row for row in self.shown if row.run_id == chosen), None)
