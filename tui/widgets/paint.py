"""Painted primitives: bars, sparklines and aligned rows as immutable `Content`, and text made harmless.

Nothing here says something by colour alone: a mark, a letter or a word always says it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmtop.profiler.units import format_bytes
from llmtop.tui.commandline.streams import BIDI, CONTROLS
from llmtop.tui.widgets.content import Content, cell_len, set_cell_size

NOT_KNOWN = "n/a"
SPARKS = "▁▂▃▄▅▆▇█"

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS and other strings
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
)
_EMOJI_STYLE = 0xFE0F
"""Terminals do not agree on whether it widens the sign before it, and the row behind it shifts."""
_HARMFUL = dict.fromkeys((*CONTROLS, *BIDI, _EMOJI_STYLE))


def harmless(text: str) -> str:
    """One line of foreign text without anything that a terminal would act on."""
    shown = text.rstrip("\r\n").rsplit("\r", 1)[-1].expandtabs(4)
    return _ESCAPES.sub("", shown).translate(_HARMFUL)


def fit(text: str, width: int) -> str:
    """Exactly `width` cells: cut with an ellipsis, or padded on the right."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + "…"


def fit_right(text: str, width: int) -> str:
    """Exactly `width` cells, padded on the left."""
    return fit(text, width) if cell_len(text) >= width else " " * (width - cell_len(text)) + text


def used_of(used: float | None, total: float | None) -> str:
    """`61.2/139 GiB`: the unit once where both have the same."""
    left, right = format_bytes(used), format_bytes(total)
    if left.split(" ")[1:] == right.split(" ")[1:]:
        left = left.split(" ")[0]
    return f"{left}/{right}"


def lines(parts: Iterable[Content | str]) -> Content:
    return Content("\n").join([part if isinstance(part, Content) else Content(part) for part in parts])


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Rows of at most `width` cells, broken at spaces where there are any, each begun by `indent`."""
    return [indent + text[begin:end] for begin, end in _broken(text, max(1, width - cell_len(indent)))]


def wrapped_rows(content: Content, width: int) -> list[Content]:
    """Each line of it in such rows, with its styles."""
    return [
        line.part(begin, end) for line in content.rows() for begin, end in _broken(line.plain, max(1, width))
    ]


def _broken(text: str, room: int) -> list[tuple[int, int]]:
    """From which character to before which each row goes; a space where it is broken is in none."""
    rows: list[tuple[int, int]] = []
    at = 0
    for word in text.split(" "):
        end = at + len(word)
        if rows and cell_len(text[rows[-1][0] : end]) <= room:
            rows[-1] = (rows[-1][0], end)
        elif word or not rows:  # more spaces at a break are in no row either
            for part in _chopped(word, room):
                rows.append((at, at + len(part)))
                at += len(part)
        at = end + 1
    return rows


def _chopped(word: str, room: int) -> list[str]:
    """A word in rows of at most `room` cells. rich's `chop_cells` loses marks that have no width."""
    rows = [""]
    for character in word:
        if rows[-1] and cell_len(rows[-1] + character) > room:
            rows.append("")
        rows[-1] += character
    return rows


def two_sided(left: Content, right: Content, width: int) -> Content:
    """One row with a left and a right end; the left one is cut when both do not fit."""
    room = width - right.cell_length - 1
    if left.cell_length > room:
        left = left.truncate(max(0, room), ellipsis=True)
    gap = max(1, width - left.cell_length - right.cell_length)
    return Content.assemble(left, " " * gap, right)


def level_style(fraction: float | None) -> str:
    """Calm until it matters."""
    if fraction is None:
        return "$muted"
    if fraction >= 0.95:
        return "$error"
    return "$warning" if fraction >= 0.85 else "$primary"


def gauge(
    fraction: float | None,
    width: int,
    *,
    style: str | None = None,
    others: float = 0.0,
    mark: float | None = None,
) -> Content:
    """A thin bar over `width` cells.

    `fraction` is drawn as a heavy line, `others` (on top of it) dashed, `mark` as a crossing tick.
    """
    if width <= 0:
        return Content("")
    if fraction is None:
        return Content.assemble(("·" * width, "$faint"))
    halves = round(min(max(fraction, 0.0), 1.0) * width * 2)
    if fraction > 0 and halves == 0:
        halves = 1
    own, half = divmod(halves, 2)
    other = min(width - own - half, round(max(others, 0.0) * width))
    cells = ["━"] * own + ["╸"] * half + ["╍"] * other
    cells += ["─"] * (width - len(cells))
    styles = [style or level_style(fraction + others)] * (own + half) + ["$muted"] * other
    styles += ["$faint"] * (width - len(styles))
    if mark is not None and 0.0 <= mark <= 1.0:
        at = min(width - 1, int(mark * width))
        cells[at] = "╋" if at < own else "┼"
        styles[at] = "$foreground"
    return _runs(cells, styles)


def _runs(cells: Sequence[str], styles: Sequence[str]) -> Content:
    """Join neighbours of one style, so that a bar is a few spans and not one per cell."""
    parts: list[tuple[str, str]] = []
    for cell, style in zip(cells, styles, strict=True):
        if parts and parts[-1][1] == style:
            parts[-1] = (parts[-1][0] + cell, style)
        else:
            parts.append((cell, style))
    return Content.assemble(*parts)


class Segment(NamedTuple):
    """One part of a stacked bar."""

    letter: str
    colour: str
    """Of the background; the letter is painted on it."""
    value: float


def stacked(segments: Sequence[Segment], scale: float, width: int, *, limit: float | None = None) -> Content:
    """A bar of blocks, each begun by its letter; what is left up to `scale` is dotted.

    `limit` is marked by a tick when it lies inside the bar.
    """
    if width <= 0 or scale <= 0:
        return Content("")
    cells = ["·"] * width
    styles = ["$faint"] * width
    begin = 0.0
    for segment in segments:
        end = begin + max(segment.value, 0.0)
        first, last = round(begin / scale * width), min(width, round(end / scale * width))
        for at in range(first, last):
            cells[at] = segment.letter if at == first else " "
            styles[at] = f"bold #101418 on {segment.colour}"
        begin = end
    if limit is not None and 0 < limit < scale:
        at = min(width - 1, int(limit / scale * width))
        cells[at], styles[at] = "┃", "bold $error"
    return _runs(cells, styles)


def sparkline(values: Sequence[float | None], width: int, *, floor: float | None = None) -> str:
    """The newest values as a row of blocks; a gap where there is none."""
    shown = _thin(values, width)
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low = min(known) if floor is None else floor
    spread = max(known) - low
    marks = []
    for value in shown:
        if value is None:
            marks.append(" ")
        elif spread <= 0:
            marks.append(SPARKS[3])
        else:
            marks.append(SPARKS[min(7, max(0, int((value - low) / spread * 7.999)))])
    return "".join(marks)


def _thin(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` values that span the whole time, each the largest of its share."""
    if width <= 0:
        return []
    if len(values) <= width:
        return list(values)
    thinned: list[float | None] = []
    for column in range(width):
        share = values[column * len(values) // width : (column + 1) * len(values) // width]
        known = [value for value in share if value is not None]
        thinned.append(max(known) if known else None)
    return thinned


def stretched(values: Sequence[float | None], width: int) -> list[float | None]:
    """Exactly `width` values over the same time: thinned, or each told several times."""
    if not values or len(values) >= width:
        return _thin(values, width)
    return [values[column * len(values) // width] for column in range(width)]


def area(
    values: Sequence[float | None], width: int, rows: int, top: float, *, mark: float | None = None
) -> list[Content]:
    """A filled curve over the whole width, `rows` high, the newest value at the right; `mark` is a level."""
    shown = stretched(values, width)
    marked = None if mark is None or top <= 0 else rows - 1 - int(min(mark / top, 0.9999) * rows)
    painted = []
    for row in range(rows):
        below = rows - 1 - row
        cells, styles = [], []
        for value in shown:
            level = 0.0 if value is None or top <= 0 else min(value / top, 1.0) * rows - below
            empty = ("─", "$accent") if row == marked else (" ", "$faint")
            eighths = min(8, round(level * 8)) if level > 0 else 0
            if below == 0 and value and not eighths:
                eighths = 1
            cell, style = (SPARKS[eighths - 1], "$primary") if eighths else empty
            cells.append(cell)
            styles.append(style)
        painted.append(_runs(cells, styles))
    return painted
