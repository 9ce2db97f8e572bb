"""Parses the text of a DeepSpeed file: JSON, else Hjson through the library that DeepSpeed reads it with."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import hjson
from msgspec import Struct

_LARGEST_HJSON = 1 << 16
"""Characters. The library's time grows with the square of a line's length: seconds at the worst here."""


class ParseError(ValueError):
    """The text is neither JSON nor Hjson; the message says why, and where as far as it is known."""


class Parsed(Struct, frozen=True, kw_only=True):
    value: Any
    not_strict: str
    """Why plain readers of JSON refuse the text; empty when they do not."""


def parse(text: str) -> Parsed:
    """The value of a document in which no object gives a key twice. Raises ParseError."""
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole, parse_float=float
        )
        return Parsed(value=value, not_strict="")
    except RecursionError:
        raise ParseError("it is nested too deeply") from None
    except _RepeatedKeyError as error:
        raise ParseError(_given_twice(text, error.key)) from None
    except ValueError as error:
        not_strict = str(error)
    if len(text) > _LARGEST_HJSON:
        raise ParseError(f"{not_strict}; with comments and the like, files up to 64 KiB are read")
    return Parsed(value=_hjson(text), not_strict=not_strict)


def _hjson(text: str) -> Any:
    try:
        return hjson.loads(text, object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite)
    except RecursionError:
        raise ParseError("it is nested too deeply") from None
    except IndexError:
        # How the library refuses both of these, and with it DeepSpeed.
        raise ParseError("a /* comment or ''' block is not closed, or a block begins in line 1") from None
    except _RepeatedKeyError as error:
        raise ParseError(_given_twice(text, error.key)) from None
    except ValueError as error:
        raise ParseError(str(error)) from None


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKeyError(key)
        found[key] = value
    return found


def _given_twice(text: str, key: str) -> str:
    """Names every line that has the key: neither parser says in which of them it found it again."""
    spelled = re.compile(rf"(?<![\w.-]){re.escape(key)}[\"']?\s*:")
    lines = [f"line {number}" for number, line in enumerate(text.split("\n"), 1) if spelled.search(line)]
    return f"the key '{key}' is given twice" + (f"; it stands in {', '.join(lines)}" if lines else "")


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def _whole(digits: str) -> int | float:
    """A number that fits no register becomes a float, so that every integer can be written out again."""
    return int(digits) if len(digits) < 19 else float(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return value
