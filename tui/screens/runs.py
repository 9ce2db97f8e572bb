"""Every run there is: open one, stop one, plan a new one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from llmtop.profiler.rundir import RunDir
from llmtop.profiler.units import format_bytes, format_count, format_seconds
from llmtop.tui.feed import RunsArrived, RunsFeed, follow_runs
from llmtop.tui.keys import RUNS_KEYS, bindings
from llmtop.tui.requests import MonitorAsked, StopAsked
from llmtop.tui.view import ENDED, STATUS_MARKS, RunRow
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
    if row.started is None:
        return "n/a"
    seconds = max(0.0, now - row.started)
    # Whole minutes: an age that ticks would repaint the table each second.
    return format_seconds(seconds - seconds % 60 if seconds < 3600 else seconds).split(" ")[0] if seconds >= 60 else "<1m"


def _steps(row: RunRow, now: float) -> str:
    return f"{row.step}/{row.steps}" if row.steps else ""


COLUMNS: tuple[RunColumn, ...] = (
    RunColumn("id", 4, lambda row, now: row.run_id.rsplit("-", 1)[-1]),
    RunColumn("recipe", 14, lambda row, now: row.name),
    RunColumn("model", 14, lambda row, now: row.model, drop=3),
    RunColumn("on", 9, lambda row, now: row.device, drop=5),
    RunColumn("state", 13, lambda row, now: " ".join(STATUS_MARKS[row.status][:2])),
    RunColumn("step", 9, _steps, right=True),
    RunColumn("loss", 6, lambda row, now: "n/a" if row.loss is None else f"{row.loss:.3f}", drop=1, right=True),
    RunColumn("tok/s", 6, lambda row, now: format_count(row.tokens_per_second), drop=2, right=True),
    RunColumn("memory", 8, lambda row, now: format_bytes(row.memory_bytes), drop=4, right=True),
    RunColumn("age", 4, _age, right=True),
)


def shown_columns(width: int) -> tuple[RunColumn, ...]:
    """The columns that fit side by side, those of least use left out."""
    kept = list(COLUMNS)
    while sum(column.cells + 1 for column in kept) + 1 > width and any(column.drop for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop))
    return tuple(kept)


class RunsScreen(Screen[None]):
    """The start: a table that keeps its cursor on its run while it is refreshed."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(RUNS_KEYS)

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._root = root
        self._clock = clock
        self._feed = RunsFeed(root)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._rows: tuple[RunRow, ...] = ()
        self._columns: tuple[RunColumn, ...] = ()
        self._painted: dict[str, tuple[str, ...]] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="runs-head", markup=False)
        yield DataTable[Content](cursor_type="row", cell_padding=0, zebra_stripes=False)
        yield Static("looking for runs", id="runs-note", markup=False)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
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
        self._rows = message.rows
        self._paint()

    def _paint(self) -> None:
        """Bring the table to `_rows`, touching only what differs."""
        table = self.query_one(DataTable)
        columns = shown_columns(self.size.width)
        ids = [row.run_id for row in self._rows]
        if columns != self._columns or ids != list(self._painted):
            self._rebuild(table, columns)
        else:
            for row in self._rows:
                self._update(table, row)
        note = self.query_one("#runs-note", Static)
        note.display = not self._rows
        if not self._rows:
            note.update(f"No runs in {self._root} yet.\n\nPress p to plan one.")
        going = sum(row.status not in ENDED for row in self._rows)
        self.query_one("#runs-head", Static).update(
            Content.assemble(
                ("llmtop", "bold $text-primary"), "  runs", (f"  {len(self._rows)}, {going} going on", "$muted")
            )
        )

    def _rebuild(self, table: DataTable[Content], columns: tuple[RunColumn, ...]) -> None:
        chosen = self._chosen()
        table.clear(columns=True)
        self._columns = columns
        spare = max(0, self.size.width - sum(column.cells + 1 for column in columns) - 1)
        for column in columns:
            width = column.cells + (min(spare, 16) if column.title in ("recipe",) else 0)
            title = fit_right(column.title, width) if column.right else fit(column.title, width)
            table.add_column(Content.styled(title + " ", "$muted"), key=column.title, width=width + 1)
        self._painted = {}
        for row in self._rows:
            texts = self._texts(row)
            table.add_row(*(self._cell(row, c, t) for c, t in zip(columns, texts, strict=True)), key=row.run_id)
            self._painted[row.run_id] = texts
        if chosen in self._painted:
            table.move_cursor(row=list(self._painted).index(chosen), animate=False)

    def _update(self, table: DataTable[Content], row: RunRow) -> None:
        texts = self._texts(row)
        for column, text, before in zip(self._columns, texts, self._painted[row.run_id], strict=True):
            if text != before:
                table.update_cell(row.run_id, column.title, self._cell(row, column, text))
        self._painted[row.run_id] = texts

    def _texts(self, row: RunRow) -> tuple[str, ...]:
        now = self._clock()
        return tuple(harmless(column.text(row, now)) for column in self._columns)

    def _cell(self, row: RunRow, column: RunColumn, text: str) -> Content:
        width = self.query_one(DataTable).columns[column.title].width - 1  # type: ignore[index]
        shown = fit_right(text, width) if column.right else fit(text, width)
        style = STATUS_MARKS[row.status][2] if column.title == "state" else ""
        return Content.styled(shown + " ", style)

    def _chosen(self) -> str | None:
        table = self.query_one(DataTable)
        if not self._painted or not table.is_valid_row_index(table.cursor_row):
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        row = self._row()
        if row is not None and row.problem:
            self.notify(row.problem, title="This run cannot be read", severity="error", markup=False)
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
        return next((row for row in self._rows if row.run_id == chosen), None)
