"""The last step before the terminal: every line in ASCII, or without colours, where the look says so."""

from __future__ import annotations

from functools import lru_cache

from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from llmtop.tui.commandline.streams import BIDI, CONTROLS
from llmtop.tui.looks.glyphs import to_ascii

_BLANKS = dict.fromkeys((*CONTROLS, *BIDI), " ")
_DEFAULT = Style.from_color(RichColor.default(), RichColor.default())
_DARKEST_REVERSED = 24
"""A background lighter than this, of 255, is one that means something: a cursor, a block of a bar."""
_DIM_BELOW = 140
"""Muted words are dim."""


class AsciiFilter(LineFilter):
    """Borders, bars, plots, marks and names alike."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


class HarmlessFilter(LineFilter):
    """Nothing that a terminal would act on, whatever a view has been given and whichever way it came.

    Views clean what they show themselves, with `paint.harmless`, for the sake of its width; this is the door.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment
            if segment.control or segment.text.isprintable()
            else Segment(segment.text.translate(_BLANKS), segment.style)
            for segment in segments
        ]


class ColourlessFilter(LineFilter):
    """The terminal's own two colours, with bold, dim and reverse in place of others. For the theme `mono`."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(text, None if style is None else _colourless(style), control)
            for text, style, control in segments
        ]


@lru_cache(4096)
def _colourless(style: Style) -> Style:
    told = _lightness(style.bgcolor)
    reverse = told is not None and told > _DARKEST_REVERSED
    fore = _lightness(style.color)
    dim = not reverse and fore is not None and fore < _DIM_BELOW
    return style + _DEFAULT + Style(reverse=True if reverse else None, dim=True if dim else None)


def _lightness(colour: RichColor | None) -> float | None:
    """0 to 255; None for none and for the terminal's own."""
    if colour is None or colour.is_default:
        return None
    red, green, blue = colour.get_truecolor()
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
