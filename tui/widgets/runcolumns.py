"""The columns of the table of runs: what each shows, how it orders, and which go where there is no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.units import format_bytes, format_count, format_progress, format_seconds
from llmtop.tui.feeds.view import STATUS_MARKS, RunRow
from llmtop.tui.widgets.columns import Order, Rank, fitting, needed_cells, ordered_by
from llmtop.tui.widgets.content import cell_len
from llmtop.tui.widgets.paint import fit, fit_right, harmless


class RunColumn(NamedTuple):
    """One column: its title, its cells, its text, its order, and how early it goes on a narrow terminal."""

    title: str
    cells: int
    text: Callable[[RunRow, float], str]
    order: Callable[[RunRow], Rank]
    """What the rows are ordered by; None comes last."""
    drop: int = 0
    """0 always stays; the largest goes first."""
    right: bool = False
    large_first: bool = False
    """Where a person asks for this order, the large ones are looked for."""


def _age(row: RunRow, now: float) -> str:
    """In its largest unit: an age that ticks would repaint the table each second."""
    if row.started is None:
        return "n/a"
    seconds = max(0.0, now - row.started)
    return format_seconds(seconds).split(" ")[0] if seconds >= 60 else "<1m"


def _state(row: RunRow, now: float) -> str:
    mark, word, _ = STATUS_MARKS[row.status]
    if row.unsaved:
        return f"{mark if row.status not in ENDED else '!'} not saved"
    return f"{mark} OOM" if row.status == "out_of_memory" else f"{mark} {word}"


def _loss(row: RunRow, now: float) -> str:
    return "n/a" if row.loss is None else f"{row.loss:.3f}"


def _steps(row: RunRow, now: float) -> str:
    return "" if row.problem else format_progress(row.step, row.steps)


_STATES = tuple(STATUS_MARKS)
"""Those that go on first."""

COLUMNS: tuple[RunColumn, ...] = (
    RunColumn("id", 4, lambda r, _: r.short_id, lambda r: r.short_id),
    RunColumn("recipe", 10, lambda r, _: r.name, lambda r: r.name),
    RunColumn("model", 11, lambda r, _: r.model, lambda r: r.model, drop=3),
    RunColumn("on", 9, lambda r, _: r.device, lambda r: r.device, drop=5),
    RunColumn("state", 11, _state, lambda r: _STATES.index(r.status)),
    RunColumn("step", 9, _steps, lambda r: r.step, right=True, large_first=True),
    RunColumn("loss", 6, _loss, lambda r: r.loss, drop=1, right=True),
    RunColumn(
        "tok/s",
        6,
        lambda r, _: format_count(r.tokens_per_second),
        lambda r: r.tokens_per_second,
        drop=2,
        right=True,
        large_first=True,
    ),
    RunColumn(
        "memory",
        8,
        lambda r, _: format_bytes(r.memory_bytes),
        lambda r: r.memory_bytes,
        drop=4,
        right=True,
        large_first=True,
    ),
    RunColumn("age", 4, _age, lambda r: None if r.started is None else -r.started, right=True),
)
_ELASTIC = ("recipe", "model")
"""Columns that take the room that is left."""


def shown_columns(width: int, rows: Sequence[RunRow] = ()) -> tuple[RunColumn, ...]:
    """The columns that fit side by side, those of least use left out.

    An id is read to be typed: its column is as wide as the longest of `rows`, up to a quarter of all cells.
    """
    longest = max((cell_len(harmless(row.short_id)) for row in rows), default=0)
    ids, *others = COLUMNS
    return fitting((ids._replace(cells=max(ids.cells, min(longest, width // 4))), *others), width)


def widths(columns: Sequence[RunColumn], width: int) -> dict[str, int]:
    """Cells of each column where `width` are to be filled."""
    spare = max(0, width - needed_cells(columns))
    return {c.title: c.cells + (min(spare // 2, 16) if c.title in _ELASTIC else 0) for c in columns}


def padded(column: RunColumn, text: str, width: int) -> str:
    return fit_right(text, width) if column.right else fit(text, width)


def ordered(rows: Sequence[RunRow], order: Order | None) -> tuple[RunRow, ...]:
    """Rows in that order, equal ones as they were; rows of which it is not known come last."""
    if order is None:
        return tuple(rows)
    column = next(column for column in COLUMNS if column.title == order.title)
    return ordered_by(rows, column.order, large_first=order.large_first)


def holds(row: RunRow, words: str) -> bool:
    """Whether a row holds each of the words, somewhere in what is told of the run."""
    _, state, _ = STATUS_MARKS[row.status]
    saved = "not saved" if row.unsaved else ""
    told = f"{row.run_id} {row.name} {row.model} {row.device} {state} {row.status} {saved}".lower()
    return all(word in told for word in words.lower().split())
