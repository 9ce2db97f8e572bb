"""Plots as SVG inside a page: lines with their band of extremes, stacked areas, stacked bars.

Colours are the page's own (`var(--c0)` and so on), so that a plot follows light, dark and print. Nothing here
needs a script. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from msgspec import Struct

from llmtop.profiler.report.envelope import Envelope

WIDTH, HEIGHT = 760, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 10, 36
COLOURS = 12
_TICKS = 4
_BAR, _GAP = 15, 7
_BAR_LEFT, _BAR_RIGHT = 220, 96

Label = Callable[[float], str]


class Line(Struct, frozen=True, kw_only=True):
    name: str
    envelope: Envelope
    colour: int
    dashed: bool = False


class Plot(Struct, frozen=True, kw_only=True):
    """Lines over one axis."""

    title: str
    lines: tuple[Line, ...]
    x_label: Label
    y_label: Label
    x_title: str
    y_unit: float = 1.0
    """Round numbers of the axis are of this much: of GiB, where the values are bytes."""
    x_unit: float = 1.0
    from_zero: bool = True
    marks: tuple[tuple[float, str], ...] = ()
    """Upright lines with what happened there."""
    limit: tuple[float, str] | None = None
    """A level line with its name: what there is of the thing."""
    x_range: tuple[float, float] | None = None
    stacked: bool = False
    """Means on top of each other, as areas."""


class Bar(Struct, frozen=True, kw_only=True):
    name: str
    parts: tuple[tuple[str, float, int], ...]
    """Name, size and colour, from left to right."""
    total: str
    """What stands behind it."""
    pale: bool = False


def plot_svg(plot: Plot) -> str:
    """Empty where there is nothing to draw."""
    lines = [line for line in plot.lines if line.envelope.x]
    if not lines:
        return ""
    left, right = plot.x_range or _x_range(lines)
    low, high = _y_range(plot, lines)
    ticks = _ticks(low, high, plot.y_unit)
    across = _scale(left, right, _LEFT, WIDTH - _RIGHT)
    up = _scale(min(low, ticks[0]), max(high, ticks[-1]), HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">',
        *_grid(plot, ticks, _ticks(left, right, plot.x_unit), across, up),
        *(_areas(lines, across, up) if plot.stacked else _bands(lines, across, up)),
        *_notes(plot, across, up),
        "</svg>",
    ]
    return "".join(parts)


def legend(names: Sequence[tuple[str, int]]) -> str:
    keys = "".join(
        f'<span><i class="k{colour % COLOURS}"></i>{escape(name)}</span>' for name, colour in names
    )
    return f'<p class="legend">{keys}</p>'


def bars_svg(title: str, bars: Sequence[Bar], label: Label) -> str:
    """Bars of one scale below each other; empty where there is nothing to draw."""
    longest = max((sum(size for _, size, _ in bar.parts) for bar in bars), default=0)
    if longest <= 0:
        return ""
    height = len(bars) * (_BAR + _GAP) + _GAP
    room = WIDTH - _BAR_LEFT - _BAR_RIGHT
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for number, bar in enumerate(bars):
        y = _GAP + number * (_BAR + _GAP)
        parts.append(_text(_BAR_LEFT - 8, y + 12, bar.name, anchor="end"))
        x = float(_BAR_LEFT)
        for name, size, colour in bar.parts:
            width = room * size / longest
            pale = ' class="pale"' if bar.pale else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"{pale}'
                f' fill="var(--c{colour % COLOURS})"><title>{escape(f"{name}: {label(size)}")}</title></rect>'
            )
            x += width
        parts.append(_text(x + 6, y + 12, bar.total))
    return "".join([*parts, "</svg>"])


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers, of which the first and the last hold the bounds or lie inside them."""
    if high <= low:
        return [low]
    raw = (high - low) / _TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low, high]


def _ticks(low: float, high: float, unit: float) -> list[float]:
    return [tick * unit for tick in nice_ticks(low / unit, high / unit)]


def _x_range(lines: Sequence[Line]) -> tuple[float, float]:
    left = min(line.envelope.x[0] for line in lines)
    right = max(line.envelope.x[-1] for line in lines)
    return (left, right) if right > left else (left - 0.5, left + 0.5)


def _y_range(plot: Plot, lines: Sequence[Line]) -> tuple[float, float]:
    if plot.stacked:
        length = min(len(line.envelope.x) for line in lines)
        high = max(sum(line.envelope.mean[at] for line in lines) for at in range(length))
        return 0.0, high or 1.0
    low = 0.0 if plot.from_zero else min(min(line.envelope.low) for line in lines)
    high = max(max(line.envelope.high) for line in lines)
    if plot.limit is not None:
        high = max(high, plot.limit[0])
    if high <= low:
        return low, low + (abs(low) or 1.0)
    return low, high


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / span


def _grid(
    plot: Plot,
    y_ticks: Sequence[float],
    x_ticks: Sequence[float],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> Iterator[str]:
    for tick in y_ticks:
        yield _level(up(tick), "grid")
        # A zero needs no unit, and has a strange one in some.
        yield _text(_LEFT - 6, up(tick) + 4, plot.y_label(tick) if tick else "0", anchor="end")
    for tick in x_ticks:
        yield _text(across(tick), HEIGHT - _BOTTOM + 15, plot.x_label(tick), anchor="middle")
    yield _text(WIDTH - _RIGHT, HEIGHT - 5, plot.x_title, anchor="end", kind="axis")


def _bands(
    lines: Sequence[Line], across: Callable[[float], float], up: Callable[[float], float]
) -> Iterator[str]:
    """From the least to the largest of each bucket, and a line through the means."""
    for line in lines:
        rows = list(line.envelope.rows())
        colour = f"var(--c{line.colour % COLOURS})"
        if line.envelope.is_thinned:
            there = [f"{across(x):.1f},{up(high):.1f}" for x, _, high, _ in rows]
            back = [f"{across(x):.1f},{up(low):.1f}" for x, low, _, _ in reversed(rows)]
            yield f'<polygon class="band" fill="{colour}" points="{" ".join(there + back)}"/>'
        points = " ".join(f"{across(x):.1f},{up(mean):.1f}" for x, _, _, mean in rows)
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        yield f'<polyline stroke="{colour}"{dash} points="{points}"/>'
        if len(rows) == 1:
            x, _, _, mean = rows[0]
            yield f'<circle cx="{across(x):.1f}" cy="{up(mean):.1f}" r="3" fill="{colour}"/>'


def _areas(
    lines: Sequence[Line], across: Callable[[float], float], up: Callable[[float], float]
) -> Iterator[str]:
    length = min(len(line.envelope.x) for line in lines)
    floor = [0.0] * length
    for line in lines:
        xs = line.envelope.x[:length]
        top = [under + mean for under, mean in zip(floor, line.envelope.mean, strict=False)]
        there = [f"{across(x):.1f},{up(y):.1f}" for x, y in zip(xs, top, strict=True)]
        back = [f"{across(x):.1f},{up(y):.1f}" for x, y in zip(reversed(xs), reversed(floor), strict=True)]
        colour = f"var(--c{line.colour % COLOURS})"
        yield f'<polygon class="area" fill="{colour}" points="{" ".join(there + back)}"/>'
        floor = top


def _notes(plot: Plot, across: Callable[[float], float], up: Callable[[float], float]) -> Iterator[str]:
    if plot.limit is not None:
        value, name = plot.limit
        yield _level(up(value), "limit")
        yield _text(WIDTH - _RIGHT - 2, up(value) + 12, name, anchor="end", kind="axis")
    for x, words in plot.marks:
        at = across(x)
        yield (
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
            f"<title>{escape(words)}</title></line>"
        )


def _level(y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    extra = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
