"""The last step before the terminal: every line in ASCII, or without colours, where the look says so."""

from __future__ import annotations

from functools import lru_cache

from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from llmtop.tui.commandline.streams import blanked
from llmtop.tui.looks.colours import lightness, without_colours
from llmtop.tui.looks.glyphs import to_ascii

_DEFAULT = Style.from_color(RichColor.default(), RichColor.default())


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
            else Segment(blanked(segment.text), segment.style)
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
    reverse, dim = without_colours(_lightness(style.color), _lightness(style.bgcolor))
    return style + _DEFAULT + Style(reverse=reverse or None, dim=dim or None)


def _lightness(colour: RichColor | None) -> float | None:
    """0 to 255; None for none and for the terminal's own."""
    if colour is None or colour.is_default:
        return None
    return lightness(*colour.get_truecolor())
