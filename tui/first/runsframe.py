"""The list of runs as rows of styled text, laid out as `looks/theme.tcss` has its screen.

What it says is said where the screen takes it from; a test holds both pictures against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmtop.tui.feeds.view import RunRow
from llmtop.tui.first.frame import BAR, EDGE_CELLS, PAGE, keys_of, row_of
from llmtop.tui.keys import RUNS_KEYS
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.footerkeys import footer, that_fit
from llmtop.tui.widgets.paint import fit
from llmtop.tui.widgets.runcolumns import RunColumn, shown_columns, widths
from llmtop.tui.widgets.runslist import OPEN, cells, colour_of, runs_head, titles

OTHER_ROWS = 3
"""Of the terminal: the head, the titles and the keys."""
_TITLES, _CURSOR = "$muted on $titles", "bold $foreground on $cursor"
"""The cursor is on the first run, and takes the colours of its cells."""


def runs_frame(
    rows: Sequence[RunRow], size: tuple[int, int], now: float, *, read_only: bool, ascii_alone: bool
) -> list[Content] | None:
    """Each row of a terminal of so many columns and rows; None where there is no run, more than have room or
    no room for a row."""
    width, height = size
    inner, columns = width - 2 * EDGE_CELLS, shown_columns(width, rows)
    sizes = widths(columns, width)
    table = sum(sizes[column.title] + 1 for column in columns)
    if not 0 < len(rows) <= height - OTHER_ROWS or table > inner:
        return None
    keys = keys_of((OPEN, *RUNS_KEYS), "Runs", read_only=read_only, ascii_alone=ascii_alone)
    first, *others = (cells(row, columns, sizes, now) for row in rows)
    told = [
        Content.styled(fit("".join(first), inner), _CURSOR),
        *(_run(row, columns, texts) for row, texts in zip(rows[1:], others, strict=True)),
    ]
    picture = [
        row_of([runs_head(rows, None, total=len(rows), read_only=read_only)], [inner], BAR),
        row_of([Content.styled(fit("".join(titles(columns, sizes, None)), inner), _TITLES)], [inner], PAGE),
        *(row_of([row], [inner], PAGE) for row in told),
        *[row_of([Content()], [inner], PAGE)] * (height - OTHER_ROWS - len(told)),
        row_of([footer(that_fit(keys, inner, "Runs"))], [inner], BAR),
    ]
    return picture if all(row.cell_length == width for row in picture) else None


def _run(row: RunRow, columns: Sequence[RunColumn], texts: Sequence[str]) -> Content:
    parts = ((text, colour_of(row, column)) for text, column in zip(texts, columns, strict=True))
    return Content.assemble(*(text if colour is None else (text, f"${colour}") for text, colour in parts))
