"""The colours of each theme, by the names that styles have for them: few, calm, and never the only thing that
tells two things apart.

`muted`: Textual's own is relative to what is under it, which painted content cannot use. `text-...`: of
words, lighter than the colour itself on a dark background, darker on a light one.
"""

from __future__ import annotations

COLOURS: dict[str, dict[str, str]] = {
    "calm": {
        "primary": "#7aa2d6",
        "secondary": "#8fc7a3",
        "accent": "#d9a66c",
        "success": "#8fc7a3",
        "warning": "#e0b860",
        "error": "#e07a7a",
        "foreground": "#d5dae1",
        "background": "#101418",
        "surface": "#101418",
        "panel": "#1a2027",
        "muted": "#8793a0",
        "faint": "#39424c",
        "text-primary": "#a7c1e3",
        "text-accent": "#e5c49d",
        "text-success": "#b5dac2",
        "text-warning": "#ead096",
        "text-error": "#eaa7a7",
    },
    "light": {
        "primary": "#2f5f9e",
        "secondary": "#2f7a4d",
        "accent": "#96590f",
        "success": "#2f7a4d",
        "warning": "#8a6100",
        "error": "#b3362f",
        "foreground": "#1d242c",
        "background": "#fafbfc",
        "surface": "#fafbfc",
        "panel": "#e9edf1",
        "muted": "#5b6672",
        "faint": "#c3cad2",
        "text-primary": "#1f3e68",
        "text-accent": "#633a09",
        "text-success": "#1f5032",
        "text-warning": "#5b4000",
        "text-error": "#76231f",
    },
    # Blue, orange and yellow, which every common colour blindness tells apart (Okabe and Ito, 2008); no red
    # stands against green.
    "colour-blind": {
        "primary": "#56b4e9",
        "secondary": "#0072b2",
        "accent": "#cc79a7",
        "success": "#56b4e9",
        "warning": "#f0e442",
        "error": "#e69f00",
        "foreground": "#e6e6e6",
        "background": "#0d0f12",
        "surface": "#0d0f12",
        "panel": "#1b1f25",
        "muted": "#9aa3ad",
        "faint": "#3d454e",
        "text-primary": "#8fcdf0",
        "text-accent": "#dda6c4",
        "text-success": "#8fcdf0",
        "text-warning": "#f5ed82",
        "text-error": "#eebf56",
    },
    # Every background is the same, so that what differs from it can be shown in reverse.
    "mono": {
        **dict.fromkeys(
            ("primary", "secondary", "accent", "success", "warning", "error", "foreground"), "#ffffff"
        ),
        **dict.fromkeys(("background", "surface", "panel"), "#000000"),
        "muted": "#a0a0a0",
        "faint": "#606060",
        **dict.fromkeys(
            ("text-primary", "text-accent", "text-success", "text-warning", "text-error"), "#ffffff"
        ),
    },
}

_DARKEST_REVERSED = 24
"""A background lighter than this, of 255, is one that means something: a cursor, a block of a bar."""
_DIM_BELOW = 140
"""Muted words are dim."""


def lightness(red: float, green: float, blue: float) -> float:
    """0 to 255, of parts of as much."""
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def without_colours(colour: float | None, background: float | None) -> tuple[bool, bool]:
    """Whether what has these lightnesses is reversed, or dim, where a terminal's own two colours are all that
    there is. None: the terminal's own."""
    reverse = background is not None and background > _DARKEST_REVERSED
    return reverse, not reverse and colour is not None and colour < _DIM_BELOW
