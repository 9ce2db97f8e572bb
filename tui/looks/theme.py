"""The colours of the app: few, calm, and never the only thing that tells two things apart."""

from __future__ import annotations

from textual.theme import Theme

CALM = Theme(
    name="calm",
    primary="#7aa2d6",
    secondary="#8fc7a3",
    accent="#d9a66c",
    success="#8fc7a3",
    warning="#e0b860",
    error="#e07a7a",
    foreground="#d5dae1",
    background="#101418",
    surface="#101418",
    panel="#1a2027",
    # Textual's own muted colour is relative to what is under it, which painted content cannot use.
    variables={"muted": "#8793a0", "faint": "#39424c"},
)

LIGHT = Theme(
    name="light",
    dark=False,
    primary="#2f5f9e",
    secondary="#2f7a4d",
    accent="#96590f",
    success="#2f7a4d",
    warning="#8a6100",
    error="#b3362f",
    foreground="#1d242c",
    background="#fafbfc",
    surface="#fafbfc",
    panel="#e9edf1",
    variables={"muted": "#5b6672", "faint": "#c3cad2"},
)

# Blue, orange and yellow, which every common colour blindness tells apart (Okabe and Ito, 2008); no red
# stands against green.
COLOUR_BLIND = Theme(
    name="colour-blind",
    primary="#56b4e9",
    secondary="#0072b2",
    accent="#cc79a7",
    success="#56b4e9",
    warning="#f0e442",
    error="#e69f00",
    foreground="#e6e6e6",
    background="#0d0f12",
    surface="#0d0f12",
    panel="#1b1f25",
    variables={"muted": "#9aa3ad", "faint": "#3d454e"},
)

# Every background is the same, so that what differs from it can be shown in reverse.
MONO = Theme(
    name="mono",
    primary="#ffffff",
    secondary="#ffffff",
    accent="#ffffff",
    success="#ffffff",
    warning="#ffffff",
    error="#ffffff",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    variables={"muted": "#a0a0a0", "faint": "#606060"},
)
"""Drawn without any colour, on the terminal's own: see `tui.looks.filters`."""

THEMES: tuple[Theme, ...] = (CALM, LIGHT, COLOUR_BLIND, MONO)
