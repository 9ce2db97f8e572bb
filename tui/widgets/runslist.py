"""What the list of runs says: its head, the titles of its columns, and each cell as it stands there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmtop.profiler.fold.runstate import ENDED
from llmtop.tui.feeds.view import STATUS_MARKS, RunRow
from llmtop.tui.keys import Key
from llmtop.tui.widgets.columns import Order
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.headrows import READ_ONLY
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.runcolumns import RunColumn, padded

OPEN = Key("enter", "select_cursor", "Open", "watch the run under the cursor", display="⏎")
"""Of the table itself."""
_MARK = "*"
"""Stands in the gap after the id of a run that is marked."""


def runs_head(
    rows: Sequence[RunRow],
    shown: int | None,
    *,
    total: int | None,
    read_only: bool,
    marked: Sequence[str] = (),
) -> Content:
    """`shown`: how many of them a filter leaves; None without one. `total`: how many there are, more than
    rows while others are still read; None before the folder was looked at.
    """
    parts: list[str | tuple[str, str]] = [("llmtop", "bold $text-primary"), "  runs"]
    if total is not None and len(rows) < total:
        # What is counted so far is no answer to how many there are, or go on.
        parts.append((f"  reading, {len(rows)} of {total} so far", "$muted"))
    elif total is not None:
        going = sum(row.status not in ENDED for row in rows)
        count = f"{len(rows)}" if shown is None else f"{shown} of {len(rows)}"
        parts.append((f"  {count}, {going} going on", "$muted"))
    if read_only:
        parts.append(READ_ONLY)
    if marked:
        ends = " and ".join(row.short_id for run_id in marked for row in rows if row.run_id == run_id)
        parts.append((f"  {_MARK} {harmless(ends)}", "$text-accent"))
    return Content.assemble(*parts)


def titles(columns: Sequence[RunColumn], sizes: Mapping[str, int], order: Order | None) -> tuple[str, ...]:
    """With the gap after each."""
    return tuple(_title(column, sizes[column.title], order) + " " for column in columns)


def _title(column: RunColumn, width: int, order: Order | None) -> str:
    mark = order.mark if order is not None and order.title == column.title else ""
    return padded(column, column.title + mark, width)


def cells(
    row: RunRow, columns: Sequence[RunColumn], sizes: Mapping[str, int], now: float, *, marked: bool = False
) -> tuple[str, ...]:
    """With the gap after each."""
    texts = []
    for column in columns:
        gap = _MARK if column.title == "id" and marked else " "
        texts.append(padded(column, harmless(column.text(row, now)), sizes[column.title]) + gap)
    return tuple(texts)


def colour_of(row: RunRow, column: RunColumn) -> str | None:
    """The colour of the theme that a cell has; None for that of all words."""
    if column.title != "state":
        return None
    return "error" if row.unsaved else STATUS_MARKS[row.status][2]
