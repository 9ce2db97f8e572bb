"""A long series in few points that still show its extremes: least, largest and mean of each bucket.

Points are gathered in buckets of equal number; when there are too many buckets, each two become one. What is
kept depends only on the points, and a series of any length takes the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

MOST_BUCKETS = 400
"""About as many as a plot is wide in pixels, so that nothing that could be seen is left out."""


class Envelope(Struct, frozen=True, kw_only=True):
    """Columns of equal length, oldest first."""

    x: tuple[float, ...] = ()
    """Of the middle of each bucket."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    points: int = 0
    """Before they were gathered."""

    @property
    def is_thinned(self) -> bool:
        return self.points > len(self.x)

    def rows(self) -> Iterator[tuple[float, float, float, float]]:
        return zip(self.x, self.low, self.high, self.mean, strict=True)


class EnvelopeBuilder:
    """Adds points one by one."""

    def __init__(self) -> None:
        self._closed: list[tuple[float, float, float, float, float, int]] = []
        """First x, last x, low, high, sum, number."""
        self._xs: list[float] = []
        self._ys: list[float] = []
        self._stride = 1
        self._points = 0

    def add(self, x: float, y: float | None) -> None:
        """A value that is not known, or not finite, is no point."""
        if y is None or y - y != 0:  # so it is for what is not finite, and faster than to ask
            return
        self._xs.append(x)
        self._ys.append(y)
        if len(self._xs) >= self._stride:
            self._close()

    def _close(self) -> None:
        xs, ys = self._xs, self._ys
        self._closed.append((xs[0], xs[-1], min(ys), max(ys), math.fsum(ys), len(ys)))
        self._points += len(ys)
        self._xs, self._ys = [], []
        if len(self._closed) >= 2 * MOST_BUCKETS:
            pairs = zip(self._closed[::2], self._closed[1::2], strict=True)
            self._closed = [_joined(first, second) for first, second in pairs]
            self._stride *= 2

    def freeze(self) -> Envelope:
        if self._xs:
            self._close()
        rows = self._closed
        if not rows:
            return Envelope()
        return Envelope(
            x=tuple((first + last) / 2 for first, last, *_ in rows),
            low=tuple(row[2] for row in rows),
            high=tuple(row[3] for row in rows),
            mean=tuple(row[4] / row[5] for row in rows),
            points=self._points,
        )


def _joined(
    first: tuple[float, float, float, float, float, int],
    second: tuple[float, float, float, float, float, int],
) -> tuple[float, float, float, float, float, int]:
    return (
        first[0],
        second[1],
        min(first[2], second[2]),
        max(first[3], second[3]),
        first[4] + second[4],
        first[5] + second[5],
    )
