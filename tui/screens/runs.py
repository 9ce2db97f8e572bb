"""Every run there is: open one, stop one, plan a new one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Static

from llmtop.profiler.rundir import RunDir
from llmtop.profiler.units import format_bytes, format_count, format_seconds
from llmtop.tui.feed import RunsArrived, RunsFeed, follow_runs
from llmtop.tui.keys import RUNS_KEYS, bindings
from llmtop.tui.requests import MonitorAsked, StopAsked
from llmtop.tui.view import ENDED, STATUS_MARKS, RunRow
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import fit, fit_right, harmless


class RunColumn(NamedTuple):
    """One column: its title, its cells, its text, and how early it goes when the terminal is narrow."""

    title: str
    cells: int
    text: Callable[[RunRow, float], str]
    drop: int = 0
    """0 always stays; the largest goes first."""
    right: bool = False


def _age(row: RunRow, now: float) -> str:
    """In its largest unit: an age that ticks would repaint the table each second."""
    if row.started is None:
        return "n/a"
    seconds = max(0.0, now - row.started)
    return format_seconds(seconds).split(" ")[0] if seconds >= 60 else "<1m"


def _state(row: RunRow, now: float) -> str:
    mark, word, _ = STATUS_MARKS[row.status]
    return f"{mark} OOM" if row.status == "out_of_memory" else f"{mark} {word}"


def _loss(row: RunRow, now: float) -> str:
    return "n/a" if row.loss is None else f"{row.loss:.3f}"


def _steps(row: RunRow, now: float) -> str:
    return f"{row.step}/{row.steps}" if row.steps else ""


COLUMNS: tuple[RunColumn, ...] = (
    RunColumn("id", 4, lambda row, now: row.run_id.rsplit("-", 1)[-1]),
    RunColumn("recipe", 10, lambda row, now: row.name),
    RunColumn("model", 11, lambda row, now: row.model, drop=3),
    RunColumn("on", 9, lambda row, now: row.device, drop=5),
    RunColumn("state", 11, _state),
    RunColumn("step", 9, _steps, right=True),
    RunColumn("loss", 6, _loss, drop=1, right=True),
    RunColumn("tok/s", 6, lambda row, now: format_count(row.tokens_per_second), drop=2, right=True),
    RunColumn("memory", 8, lambda row, now: format_bytes(row.memory_bytes), drop=4, right=True),
    RunColumn("age", 4, _age, right=True),
)
_ELASTIC = ("recipe", "model")
"""Columns that take the room that is left."""
_MARGIN_CELLS = 2


def shown_columns(width: int) -> tuple[RunColumn, ...]:
    """The columns that fit side by side, those of least use left out."""
    kept = list(COLUMNS)
    while _needed(kept) > width and any(column.drop for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop))
    return tuple(kept)


def _needed(columns: Sequence[RunColumn]) -> int:
    return sum(column.cells + 1 for column in columns) + _MARGIN_CELLS


class RunTable(DataTable[Text]):
    """Shows in the footer what Enter does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Open", key_display="⏎"),
    ]


class RunsScreen(Screen[None]):
    """The start: a table that keeps its cursor on its run while it is refreshed."""

    HELP_TITLE: ClassVar[str] = "Runs"
    """Of its keys in the help."""
    BINDINGS: ClassVar[list[BindingType]] = bindings(RUNS_KEYS)

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._root = root
        self._clock = clock
        self._feed = RunsFeed(root)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self.rows: tuple[RunRow, ...] = ()
        self._columns: tuple[RunColumn, ...] = ()
        self._widths: dict[str, int] = {}
        self._painted: dict[str, tuple[str, ...]] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="runs-head", markup=False)
        yield RunTable(cursor_type="row", cell_padding=0)
        yield Static("looking for runs", id="runs-note", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(RunTable).focus()
        self._follow()

    def on_unmount(self) -> None:
        self._stop.set()
        self._wake.set()

    def on_screen_resume(self) -> None:
        self._wake.set()

    @work(thread=True, exclusive=True, group="feed")
    def _follow(self) -> None:
        follow_runs(self._feed, self.post_message, self._stop, self._wake)

    def on_resize(self) -> None:
        self._paint()

    def on_runs_arrived(self, message: RunsArrived) -> None:
        self.rows = message.rows
        self._paint()

    def _paint(self) -> None:
        """Bring the table to `rows`, touching only what differs."""
        table = self.query_one(RunTable)
        columns = shown_columns(self.size.width)
        ids = [row.run_id for row in self.rows]
        if columns != self._columns or ids != list(self._painted):
            self._rebuild(table, columns)
        else:
            for row in self.rows:
                self._update(table, row)
        note = self.query_one("#runs-note", Static)
        note.display = not self.rows
        table.display = bool(self.rows)
        if not self.rows:
            note.update(f"No runs in {self._root} yet.\n\nPress p to plan one.")
        going = sum(row.status not in ENDED for row in self.rows)
        self.query_one("#runs-head", Static).update(
            Content.assemble(
                ("llmtop", "bold $text-primary"),
                "  runs",
                (f"  {len(self.rows)}, {going} going on", "$muted"),
            )
        )

    def _rebuild(self, table: RunTable, columns: tuple[RunColumn, ...]) -> None:
        chosen = self._chosen()
        table.clear(columns=True)
        self._columns = columns
        spare = max(0, self.size.width - _needed(columns))
        for column in columns:
            width = column.cells + (min(spare // 2, 16) if column.title in _ELASTIC else 0)
            title = fit_right(column.title, width) if column.right else fit(column.title, width)
            self._widths[column.title] = width
            table.add_column(Text(title + " "), key=column.title, width=width + 1)
        self._painted = {}
        for row in self.rows:
            texts = self._texts(row)
            cells = [self._cell(row, column, text) for column, text in zip(columns, texts, strict=True)]
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
        now = self._clock()
        return tuple(harmless(column.text(row, now)) for column in self._columns)

    def _cell(self, row: RunRow, column: RunColumn, text: str) -> Text:
        width = self._widths[column.title]
        shown = fit_right(text, width) if column.right else fit(text, width)
        colour = (
            getattr(self.app.current_theme, STATUS_MARKS[row.status][2]) if column.title == "state" else None
        )
        # Text and not str: a table reads markup in plain strings.
        return Text(shown + " ", style=colour or "")

    def _chosen(self) -> str | None:
        table = self.query_one(RunTable)
        if not self._painted or not table.is_valid_row_index(table.cursor_row):
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        row = self._row()
        if row is not None and row.problem:
            self.notify(
                harmless(row.problem), title="This run cannot be read", severity="error", markup=False
            )
        elif row is not None:
            self.post_message(MonitorAsked(row.run_id))

    def action_stop(self) -> None:
        row = self._row()
        if row is None:
            return
        if row.status in ENDED:
            self.notify("It has ended already.", title=harmless(row.name), markup=False)
        else:
            self.post_message(StopAsked(RunDir(self._root / row.run_id)))

    def action_refresh(self) -> None:
        self._wake.set()

    def _row(self) -> RunRow | None:
        chosen = self._chosen()
        return next((row for row in self.rows if row.run_id == chosen), None)
