"""Which theme and which signs: by the environment, by what a person chose last, or by what the terminal can.

`LLMTOP_THEME` holds the name of a theme, `ascii` or `unicode`, or both, as `mono,ascii`. It wins over
`NO_COLOR` and over what was chosen in the app, which is remembered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from llmtop.presets.errors import UsageError, nearest
from llmtop.profiler.record.wholefile import write_atomic
from llmtop.tui.looks.glyphs import only_ascii

THEME_NAMES = ("calm", "light", "colour-blind", "mono")
VARIABLE = "LLMTOP_THEME"
_SIGNS = {"ascii": True, "unicode": False}
_COLOURLESS_TERMINALS = ("dumb", "vt", "unknown")


class Look(msgspec.Struct, frozen=True, kw_only=True):
    theme: str = THEME_NAMES[0]
    ascii: bool = False
    """Whether nothing but ASCII is drawn."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a person chose in the app; None: nothing, the terminal decides."""

    theme: str | None = None
    ascii: bool | None = None


def look_of(environ: Mapping[str, str], chosen: Chosen) -> Look:
    """Raises UsageError for a word in `LLMTOP_THEME` that is none."""
    wish = _wish(environ.get(VARIABLE, ""))
    return Look(
        theme=wish.theme or _by_no_color(environ) or _known(chosen.theme) or _by_terminal(environ),
        ascii=next((said for said in (wish.ascii, chosen.ascii) if said is not None), only_ascii(environ)),
    )


def _wish(words: str) -> Chosen:
    wish = Chosen()
    for word in words.replace(",", " ").lower().split():
        if word in _SIGNS:
            wish = msgspec.structs.replace(wish, ascii=_SIGNS[word])
        elif word in THEME_NAMES:
            wish = msgspec.structs.replace(wish, theme=word)
        else:
            known = (*THEME_NAMES, *_SIGNS)
            guess = nearest(word, known)
            raise UsageError(
                f"{VARIABLE} holds '{word}', which is no theme",
                fix=f"did you mean '{guess}'?"
                if guess
                else f"one of {', '.join(known)}, or two as mono,ascii",
            )
    return wish


def _by_no_color(environ: Mapping[str, str]) -> str | None:
    return "mono" if environ.get("NO_COLOR") else None


def _by_terminal(environ: Mapping[str, str]) -> str:
    poor = environ.get("TERM", "").startswith(_COLOURLESS_TERMINALS)
    return "mono" if poor else THEME_NAMES[0]


def _known(theme: str | None) -> str | None:
    return theme if theme in THEME_NAMES else None


def choices_path(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CONFIG_HOME/llmtop/look.json`, else in `~/.config`."""
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "llmtop" / "look.json"


def read_choice(path: Path) -> Chosen:
    """What was chosen last; nothing where that is not there or damaged: looks are no reason to fail."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Chosen)
    except (OSError, msgspec.MsgspecError):
        return Chosen()


def write_choice(path: Path, chosen: Chosen) -> None:
    """Raises OSError where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, msgspec.json.encode(chosen) + b"\n")
