"""The themes of the app, as Textual wants them."""

from __future__ import annotations

from textual.theme import Theme

from llmtop.tui.looks.colours import COLOURS


def _theme(name: str, *, dark: bool = True) -> Theme:
    colours = COLOURS[name]
    own = {key: colour for key, colour in colours.items() if key in ("muted", "faint") or "-" in key}
    return Theme(
        name=name,
        dark=dark,
        variables=own,
        **{key: colour for key, colour in colours.items() if key not in own},  # type: ignore[arg-type]
    )


CALM = _theme("calm")
LIGHT = _theme("light", dark=False)
COLOUR_BLIND = _theme("colour-blind")
MONO = _theme("mono")
"""Drawn without any colour, on the terminal's own: see `tui.looks.filters`."""

THEMES: tuple[Theme, ...] = (CALM, LIGHT, COLOUR_BLIND, MONO)
