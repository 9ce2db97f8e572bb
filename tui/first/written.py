"""Styled text as a terminal takes it: colours of the theme by escape sequences, without rich."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from llmtop.tui.commandline.streams import blanked
from llmtop.tui.looks.colours import COLOURS, lightness, without_colours
from llmtop.tui.looks.glyphs import to_ascii
from llmtop.tui.looks.look import Look
from llmtop.tui.widgets.content import Content

_ALIASES = {"footer-key-foreground": "accent", "footer-description-foreground": "foreground"}
_BLENDS = {"cursor": ("primary", 0.3), "titles": ("foreground", 0.05)}
"""Of a table: a colour and its share over the background, as `looks/theme.tcss` and the toolkit have them."""
_ATTRIBUTES = {"bold": "1", "dim": "2", "italic": "3", "underline": "4", "reverse": "7"}


class _Style(NamedTuple):
    colour: str = ""
    background: str = ""
    attributes: tuple[str, ...] = ()

    def under(self, words: str) -> _Style:
        """With what these words add or put in place."""
        colour, background, attributes, behind = *self, False
        for word in words.split():
            if word == "on":
                behind = True
            elif word in _ATTRIBUTES:
                attributes = (*attributes, _ATTRIBUTES[word])
            elif behind:
                background = word
            else:
                colour = word
        return _Style(colour, background, attributes)


def colours_of(environ: Mapping[str, str]) -> int | None:
    """How many colours the terminal has, as the toolkit sees it; None: fewer than painting here is for."""
    if environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return 1 << 24
    return 256 if environ.get("TERM", "").strip().lower().endswith("-256color") else None


def written(rows: list[Content], look: Look, colours: int) -> str:
    """The rows from the terminal's upper left corner on, each of them whole."""
    known: dict[_Style, str] = {}
    parts: list[str] = []
    for number, row in enumerate(rows, start=1):
        parts.append(f"\x1b[{number};1H")
        for text, style in _pieces(row):
            if style not in known:
                known[style] = _sequence(style, look, colours)
            shown = blanked(text)
            parts += (known[style], to_ascii(shown) if look.ascii else shown)
    return "".join((*parts, "\x1b[0m"))


def _pieces(row: Content) -> list[tuple[str, _Style]]:
    """The row in texts of one style each."""
    edges = sorted({0, len(row.plain), *(edge for begin, end, _ in row.spans for edge in (begin, end))})
    pieces = []
    for begin, end in zip(edges, edges[1:], strict=False):
        style = _Style()
        for first, stop, words in row.spans:
            if first <= begin and end <= stop:
                style = style.under(words)
        pieces.append((row.plain[begin:end], style))
    return pieces


def _sequence(style: _Style, look: Look, colours: int) -> str:
    colour, background = (_parts(word, look.theme) for word in style[:2])
    codes = ["0", *style.attributes]
    if look.theme == "mono":
        reverse, dim = without_colours(lightness(*colour), lightness(*background))
        codes += ["7"] if reverse else ["2"] if dim else []
    else:
        code = _true if colours > 256 else _of_256
        codes += [f"38;{code(colour)}", f"48;{code(background)}"]
    return f"\x1b[{';'.join(codes)}m"


_Parts = tuple[int, int, int]
_Code = Callable[[_Parts], str]


def _parts(word: str, theme: str) -> _Parts:
    name = word.removeprefix("$")
    if word.startswith("$") and name in _BLENDS:
        over, share = _BLENDS[name]
        under = zip(_parts("$background", theme), _parts(f"${over}", theme), strict=True)
        red, green, blue = (int(low + (high - low) * share) for low, high in under)
        return red, green, blue
    found = COLOURS[theme][_ALIASES.get(name, name)] if word.startswith("$") else word
    red, green, blue = bytes.fromhex(found[1:])
    return red, green, blue


def _true(colour: _Parts) -> str:
    return "2;{};{};{}".format(*colour)


def _of_256(colour: _Parts) -> str:
    """The nearest of xterm's: of its greys where there is little colour, else of its cube."""
    least, most = min(colour) / 255, max(colour) / 255
    middle = (least + most) / 2
    spread = most + least if middle <= 0.5 else 2.0 - most - least
    if most == least or (most - least) / spread < 0.15:
        grey = round(middle * 25.0)
        return f"5;{16 if grey == 0 else 231 if grey == 25 else 231 + grey}"
    six = [round(part / 95 if part < 95 else 1 + (part - 95) / 40) for part in colour]
    return f"5;{16 + 36 * six[0] + 6 * six[1] + six[2]}"
