"""Every sign that is drawn, in ASCII, for terminals and locales that have no other. Widths stay the same."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

_SIGNS: dict[str, str] = {
    **dict.fromkeys("━█▉▊▋▇", "#"),
    **dict.fromkeys("╸▌▍▎▐▆▅▄", "="),
    **dict.fromkeys("▃▂▁▏▔", "_"),
    **dict.fromkeys("╍┄┅┈┉", "~"),
    **dict.fromkeys("─╌╴╶╼╾═╺", "-"),
    **dict.fromkeys("│┃║╎╏▕┊┆", "|"),
    **dict.fromkeys("┼╋╂┿╬├┤┬┴┌┐└┘╭╮╰╯┏┓┗┛┣┫┳┻╔╗╚╝╠╣╦╩", "+"),
    **dict.fromkeys("·∙⋅", "."),
    **dict.fromkeys("●⬤", "*"),
    **dict.fromkeys("◌○◯", "o"),
    **dict.fromkeys("◐◑◒◓", "%"),
    **dict.fromkeys("■▪◼", "#"),
    **dict.fromkeys("✓✔☑", "v"),
    **dict.fromkeys("✗✘×", "x"),
    **dict.fromkeys("→▶▸►⏵▷", ">"),
    **dict.fromkeys("←◀◂◄", "<"),
    **dict.fromkeys("↑▲▴△", "^"),
    **dict.fromkeys("↓▼▾▽", "v"),
    **dict.fromkeys("‘’′", "'"),
    **dict.fromkeys("“”″", '"'),
    **dict.fromkeys("–—−‐‑", "-"),
    **dict.fromkeys("░▒▓", ":"),
    "…": "~",
    "‖": "=",
    "⏎": "<",
    "⌫": "<",
    "⎋": "^",
    "≈": "~",
    "≤": "<",
    "≥": ">",
    "µ": "u",
    "μ": "u",
    "°": "'",
    "\u00a0": " ",
}

_LEFT_DOTS, _RIGHT_DOTS = (0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)
"""Of a braille cell, from its top row to its bottom row."""


def _braille(code: int) -> str:
    """A plot's cell of two by four dots, by the rows that it fills."""
    dots = code - 0x2800
    rows = [
        bool(dots & left) or bool(dots & right) for left, right in zip(_LEFT_DOTS, _RIGHT_DOTS, strict=True)
    ]
    if not any(rows):
        return " "
    if sum(rows) >= 3:
        return "|"
    if rows[0] and rows[3]:
        return ":"
    weight = sum(number for number, row in enumerate(rows) if row) / sum(rows)
    return "'" if weight < 1 else "-" if weight <= 2 else "."


class _Table(dict[int, str]):
    """A translation that learns each sign when it is first seen."""

    def __missing__(self, code: int) -> str:
        found = chr(code) if code < 0x80 else _ascii(chr(code))
        self[code] = found
        return found


def _ascii(sign: str) -> str:
    if sign in _SIGNS:
        return _SIGNS[sign]
    if 0x2800 <= ord(sign) <= 0x28FF:
        return _braille(ord(sign))
    kind = unicodedata.category(sign)
    if kind in ("Mn", "Me", "Cf"):
        return ""
    if kind in ("Cn", "Co", "Cs"):
        return "?"
    plain = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    wide = unicodedata.east_asian_width(sign) in ("W", "F")
    if wide:
        return plain[:2].ljust(2, " ") if plain else "??"
    return plain[0] if plain else "?"


_TABLE = _Table()


def to_ascii(text: str) -> str:
    """The text in ASCII alone, as wide as it was."""
    return text if text.isascii() else text.translate(_TABLE)


_KEYS = {"⏎": "Enter", "⌫": "Bksp", "←": "Left", "→": "Right", "↑": "Up", "↓": "Down"}


def spelt(key: str) -> str:
    """The name of a key in words where its sign cannot be drawn."""
    return "".join(_KEYS.get(sign, sign) for sign in key)


_POOR_TERMINALS = ("dumb", "linux", "ansi", "vt", "cons", "sun", "unknown")
"""Beginnings of what `TERM` says where only ASCII can be relied on; the Linux console lacks most signs."""


def only_ascii(environ: Mapping[str, str]) -> bool:
    """Whether nothing but ASCII should be drawn: by the locale or the kind of terminal."""
    if environ.get("TERM", "").startswith(_POOR_TERMINALS):
        return True
    named = next((environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environ.get(name)), "")
    asked = environ.get("LC_ALL") or environ.get("LANG", "")
    if named.upper().startswith("C.UTF") and asked in ("C", "POSIX"):
        # Python itself sets LC_CTYPE to this where a person has asked for C.
        return True
    return bool(named) and not named.upper().replace("-", "").endswith(("UTF8", "UTF8@EURO"))
