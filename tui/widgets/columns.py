"""What the tables of runs and of hosts share: which columns fit, and rows in the order of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

Rank = float | str | None
"""What a column orders a row by; None: not known."""
_MARGIN_CELLS = 2


class Column(Protocol):
    @property
    def cells(self) -> int: ...
    @property
    def drop(self) -> int:
        """How early it goes on a narrow terminal: 0 always stays; the largest goes first."""


class Order(NamedTuple):
    """By which column, and in which direction."""

    title: str
    large_first: bool

    @property
    def mark(self) -> str:
        return "▾" if self.large_first else "▴"


_Column = TypeVar("_Column", bound=Column)
_Row = TypeVar("_Row")


def needed_cells(columns: Sequence[Column]) -> int:
    """Of all of them side by side, with the margins."""
    return sum(column.cells + 1 for column in columns) + _MARGIN_CELLS


def fitting(columns: Sequence[_Column], width: int) -> tuple[_Column, ...]:
    """The columns that fit side by side, those of least use left out."""
    kept = list(columns)
    while needed_cells(kept) > width and any(column.drop for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop))
    return tuple(kept)


def ordered_by(rows: Sequence[_Row], rank: Callable[[_Row], Rank], *, large_first: bool) -> tuple[_Row, ...]:
    """Equal ones as they were, those of which it is not known last."""
    known = [row for row in rows if rank(row) is not None]
    unknown = [row for row in rows if rank(row) is None]
    # A column holds either numbers or words.
    known.sort(key=rank, reverse=large_first)  # type: ignore[arg-type]
    return (*known, *unknown)
