"""Reads TOML of the plainest form, as presets are written, in a tenth of the time of Python's own reader.

Tables in brackets, and below them lines of `key = value` with a text, a number, true or false. Whatever is
anything more, or wrong, is left to `tomllib`, which is not even loaded where nothing is.
"""

from __future__ import annotations

from typing import Any

import msgspec

_KEY = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_LONGEST_NUMBER = 18
"""Longer ones may be more than 64 bits."""


def plain_toml(text: str) -> dict[str, Any] | None:
    """What `tomllib` makes of the text; None where it is not of the plain form."""
    values: dict[str, Any] = {}
    table = values
    for line in text.split("\n"):
        if not line or (line[0] == "#" and line.isprintable()):
            continue
        if line[0] == "[":
            opened = _opened(values, line)
            if opened is None:
                return None
            table = opened
            continue
        key, _, word = line.partition(" = ")
        if not _is_key(key) or key in table:
            return None
        value = _value(word)
        if value is None:
            return None
        table[key] = value
    return values


def _opened(values: dict[str, Any], line: str) -> dict[str, Any] | None:
    """The new table of a line `[name]` or `[name.of.it]`."""
    names = line[1:-1].split(".")
    if line[-1] != "]" or not all(map(_is_key, names)):
        return None
    for name in names[:-1]:
        below: object = values.setdefault(name, {})
        if not isinstance(below, dict):
            return None
        values = below
    if names[-1] in values:
        return None
    opened = values[names[-1]] = {}
    return opened


def _is_key(word: str) -> bool:
    return bool(word) and _KEY.issuperset(word)


def _value(word: str) -> Any:
    """A text, a number or a truth that JSON spells as TOML does; None for what it does not."""
    if word == "true" or word == "false":
        return word == "true"
    if not word or not word.isprintable() or "\\" in word:
        return None
    if word[0] != '"' and (len(word) > _LONGEST_NUMBER or not (word[0].isdigit() or word[0] == "-")):
        return None
    try:
        return msgspec.json.decode(word)
    except msgspec.DecodeError:
        return None
