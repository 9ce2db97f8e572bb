"""The columns of the table of hosts: what each shows, how it orders, and which go where there is no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmtop.profiler.fleet.overview import HostRow
from llmtop.profiler.units import format_bytes, format_percent, format_rate, format_seconds
from llmtop.tui.feeds.fleetview import HOST_MARKS
from llmtop.tui.widgets.columns import Order, Rank, fitting, needed_cells, ordered_by
from llmtop.tui.widgets.paint import fit, fit_right

_STATES = tuple(HOST_MARKS)


class HostColumn(NamedTuple):
    """One column: its title, its cells, its text, its order, and how early it goes on a narrow terminal."""

    title: str
    cells: int
    text: Callable[[HostRow], str]
    order: Callable[[HostRow], Rank]
    """What the rows are ordered by; None comes last."""
    drop: int = 0
    """0 always stays; the largest goes first."""
    right: bool = False
    large_first: bool = True
    """Where a person asks for this order, the large ones are looked for."""


def _state(row: HostRow) -> str:
    mark, word, _ = HOST_MARKS[row.status]
    return f"{mark} {word}"


def _step(row: HostRow) -> str:
    return str(row.step) if row.step else "n/a"


def _slowest(row: HostRow) -> str:
    """Who is slow is told by what ranks do alone; in a whole step all wait for the slowest."""
    slow = row.alone or row.step_seconds
    return "n/a" if slow is None else str(slow.rank)


def _excess(row: HostRow) -> str:
    return "n/a" if row.excess is None else format_percent(100 * row.excess, signed=True, digits=0)


def _age(row: HostRow) -> str:
    """In its largest unit: an age that ticks would repaint the table each second."""
    if row.quiet_seconds is None:
        return "n/a"
    return "now" if row.quiet_seconds < 15 else format_seconds(row.quiet_seconds).split(" ")[0].split(".")[0]


COLUMNS: tuple[HostColumn, ...] = (
    HostColumn("host", 12, lambda r: r.name, lambda r: r.first_rank, large_first=False),
    HostColumn("state", 11, _state, lambda r: _STATES.index(r.status), large_first=False),
    HostColumn(
        "ranks", 5, lambda r: f"{r.alive}/{r.ranks}", lambda r: r.alive - r.ranks, 5, True, large_first=False
    ),
    HostColumn("step", 7, _step, lambda r: r.step, right=True, large_first=False),
    HostColumn(
        "a step",
        7,
        lambda r: format_seconds(r.step_seconds.high if r.step_seconds else None),
        lambda r: r.step_seconds.high if r.step_seconds else None,
        drop=2,
        right=True,
    ),
    HostColumn("slow", 5, _slowest, lambda r: r.alone.rank if r.alone else None, drop=1, right=True),
    HostColumn("excess", 6, _excess, lambda r: r.excess, right=True),
    HostColumn(
        "peak",
        8,
        lambda r: format_bytes(r.peak_bytes.high if r.peak_bytes else None),
        lambda r: r.peak_bytes.high if r.peak_bytes else None,
        drop=4,
        right=True,
    ),
    HostColumn(
        "busy",
        4,
        lambda r: format_percent(r.busy_percent, digits=0),
        lambda r: r.busy_percent,
        drop=3,
        right=True,
        large_first=False,
    ),
    HostColumn(
        "host mem",
        8,
        lambda r: format_percent(None if r.memory_share is None else 100 * r.memory_share, digits=0),
        lambda r: r.memory_share,
        drop=7,
        right=True,
    ),
    HostColumn(
        "network",
        10,
        lambda r: format_rate(r.network_bytes_per_second),
        lambda r: r.network_bytes_per_second,
        drop=6,
        right=True,
    ),
    HostColumn("told", 4, _age, lambda r: r.quiet_seconds, right=True),
)
_NOTE_CELLS = 14
"""What the words about a host have at least, at the end of its row."""


def shown_columns(width: int) -> tuple[HostColumn, ...]:
    """The columns that fit side by side, those of least use left out."""
    return fitting(COLUMNS, width - _NOTE_CELLS)


def padded(column: HostColumn, text: str) -> str:
    return fit_right(text, column.cells) if column.right else fit(text, column.cells)


def note_cells(columns: Sequence[HostColumn], width: int) -> int:
    return max(0, width - needed_cells(columns))


def ordered(rows: Sequence[HostRow], order: Order | None) -> tuple[HostRow, ...]:
    """The worst first, or by a column: equal ones as they were, those of which it is not known last."""
    if order is None:
        return tuple(sorted(rows, key=lambda row: row.worst_first))
    column = next(column for column in COLUMNS if column.title == order.title)
    return ordered_by(rows, column.order, large_first=order.large_first)


def holds(row: HostRow, words: str) -> bool:
    """Whether a row holds each of the words, somewhere in what is told of the host; `rank5` is a rank."""
    _, state, _ = HOST_MARKS[row.status]
    told = f"{row.name} {state} {row.severity} {row.note}".lower()
    return all(word in told or _has_rank(row, word) for word in words.lower().split())


def _has_rank(row: HostRow, word: str) -> bool:
    number = word.removeprefix("rank")
    return number != word and number.isdecimal() and 0 <= int(number) - row.first_rank < row.ranks
