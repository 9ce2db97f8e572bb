"""Line plots with logarithmic axes as small SVG files that are the same for the same points."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from msgspec import Struct

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 290, 40, 50
_COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b",
    "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#000000", "#aaaaaa",
)  # fmt: skip


class Line(Struct, frozen=True, kw_only=True):
    name: str
    points: tuple[tuple[float, float], ...]
    """Both coordinates above zero."""


class Plot(Struct, frozen=True, kw_only=True):
    title: str
    x_title: str
    y_title: str
    lines: tuple[Line, ...]
    x_label: Callable[[float], str] = "{:g}".format
    y_label: Callable[[float], str] = "{:g}".format


def svg(plot: Plot) -> str:
    """The file's text. Raises ValueError for a plot without a point."""
    points = [point for line in plot.lines for point in line.points]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    if not points:
        raise ValueError(f"{plot.title}: no points")
    across = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    ticks = powers(min(ys), max(ys))
    up = _scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 22, plot.title, weight="bold"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, plot.x_title, anchor="middle"),
        _text(_LEFT, _TOP - 6, plot.y_title),
    ]
    for y in ticks:
        parts.append(_segment(_LEFT, up(y), _WIDTH - _RIGHT, up(y)))
        parts.append(_text(_LEFT - 6, up(y) + 4, plot.y_label(y), anchor="end"))
    for x in xs:
        parts.append(_segment(across(x), _TOP, across(x), _HEIGHT - _BOTTOM))
        parts.append(_text(across(x), _HEIGHT - _BOTTOM + 18, plot.x_label(x), anchor="middle"))
    for number, line in enumerate(plot.lines):
        parts += _drawn(line, _COLOURS[number % len(_COLOURS)], number, across, up)
    return "\n".join([*parts, "</svg>"]) + "\n"


def powers(low: float, high: float) -> list[float]:
    """Powers of two that hold both bounds between the first and the last."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    return [2.0**power for power in range(first, max(last, first + 1) + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = math.log(high / low) or 1.0
    return lambda value: start + (end - start) * math.log(value / low) / span


def _drawn(
    line: Line, colour: str, number: int, across: Callable[[float], float], up: Callable[[float], float]
) -> list[str]:
    places = [(across(x), up(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    at = _TOP + 10 + 18 * number
    left = _WIDTH - _RIGHT + 14
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        f'<rect x="{left}" y="{at - 8}" width="12" height="4" fill="{colour}"/>',
        _text(left + 18, at, line.name, size=10),
    ]


def _segment(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "", size: int = 12) -> str:
    extra = f' font-weight="{weight}"' if weight else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}"{extra}>{escape(text)}</text>'
