"""The colours of the app: few, calm, and never the only thing that tells two things apart."""

from __future__ import annotations

from textual.theme import Theme

THEME = Theme(
    name="llmtop",
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
