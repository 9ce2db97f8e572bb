"""What an app draws, as text with its styles, kept in files that a person can read and compare.

Not SVG, which a browser shows: a picture of 200 by 60 is 150 KB there, most of it markup that Rich writes
otherwise in each version, and a difference in it tells nobody what has changed. Here a screen is its rows,
and below them the styles by the names that the theme has for its colours, so a colour that a theme mends is
no change, and a word that loses its colour is one.
"""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.app import App

SNAPSHOTS = Path(__file__).parent / "snapshots"
WRITING = os.environ.get("LLMTOP_SNAPSHOTS") == "write"
"""`LLMTOP_SNAPSHOTS=write` writes the pictures anew."""

_NAMES = (
    *("foreground", "background", "panel", "muted", "faint", "primary", "secondary", "accent"),
    *("success", "warning", "error", "text-primary", "text-accent", "text-success", "text-warning"),
    *("text-error", "text-secondary"),
)
"""Of the theme's colours; of two with one colour the first is told."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def picture(app: App[Any]) -> str:
    """The screen that stands on top."""
    names = _colour_names(app)
    rows = [list(strip) for strip in app.screen._compositor.render_strips()]
    text = ["".join(segment.text for segment in row).rstrip() for row in rows]
    runs = [_runs(row, names) for row in rows]
    letters = {style: _LETTERS[at] for at, style in enumerate(sorted({s for row in runs for s, _ in row}))}
    told = ["".join(f"{letters[style]}{cells}" for style, cells in row) for row in runs]
    legend = [f"{letter} {style}" for style, letter in letters.items()]
    return "\n".join([*text, "-- styles --", *legend, "-- rows --", *_folded(told)]) + "\n"


def _colour_names(app: App[Any]) -> dict[str, str]:
    colours = app.theme_variables
    found: dict[str, str] = {}
    for name in _NAMES:
        value = colours.get(name, "").lower()
        if value.startswith("#"):
            found.setdefault(value[:7], name)
    return found


def _runs(row: list[Segment], names: dict[str, str]) -> list[tuple[str, int]]:
    """Style and cells, from left to right."""
    cells = [(_style_name(segment, names), segment.cell_length) for segment in row if segment.text]
    return [
        (style, sum(count for _, count in run)) for style, run in groupby(cells, key=lambda cell: cell[0])
    ]


def _style_name(segment: Segment, names: dict[str, str]) -> str:
    style = segment.style or Style()
    words = [word for word in ("bold", "dim", "italic", "underline", "reverse") if getattr(style, word)]
    # Blanks have no colour that could be seen.
    if segment.text.strip() or style.reverse or style.underline:
        words.append(_colour(style.color, names))
    else:
        words = ["blank"]
    return f"{' '.join(words)} on {_colour(style.bgcolor, names)}"


def _colour(colour: Any, names: dict[str, str]) -> str:
    if colour is None or colour.is_default:
        return "default"
    told = str(colour.get_truecolor().hex).lower()
    return names.get(told, told)


def _folded(rows: list[str]) -> list[str]:
    """Rows with their numbers; equal ones that follow each other once."""
    folded = []
    for told, run in groupby(enumerate(rows, start=1), key=lambda numbered: numbered[1]):
        numbers = [number for number, _ in run]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        folded.append(f"{span} {told}")
    return folded
