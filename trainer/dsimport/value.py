"""Reads one value of a configuration as the type that its key takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from llmtop.presets.errors import nearest, written
from llmtop.presets.truth import truth
from llmtop.trainer.dsimport.keys import Key, Kind

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_LARGEST_WHOLE = 2**63 - 1


class BadValue(Exception):
    """The value cannot be read as what the key takes."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


class Read(Struct, frozen=True):
    value: Any
    note: str = ""
    """What was odd about its spelling."""


def read_value(key: Key, value: Any) -> Read:
    """The value in the key's own type. Raises BadValue."""
    if isinstance(value, list) and key.kind not in ("texts", "anything"):
        raise BadValue(
            "is a list, which only DeepSpeed's autotuner understands, as values to try",
            "give one of the values",
        )
    if isinstance(value, str) and (word := _PYTHON_WORDS.get(value.rstrip(","))) and key.kind != "text":
        raise BadValue("is Python, not JSON", f"write {word}")
    read = _READERS[key.kind](key, value)
    if isinstance(read.value, (int, float)) and not isinstance(read.value, bool):
        _refuse_out_of_range(key, read.value)
    return read


def _refuse_out_of_range(key: Key, number: float) -> None:
    too_small = key.low is not None and number < key.low or key.above is not None and number <= key.above
    too_large = key.high is not None and number > key.high or key.below is not None and number >= key.below
    if too_small or too_large:
        raise BadValue(f"is too {'small' if too_small else 'large'}", f"give {key.expected}")


def _flag(key: Key, value: Any) -> Read:
    said = truth(value)
    if said is None:
        raise BadValue("is neither true nor false")
    return Read(said, "is a text where a truth value belongs" if isinstance(value, str) else "")


def _number(key: Key, value: Any) -> Read:
    if isinstance(value, bool):
        raise BadValue("is a truth value where a number belongs", f"give {key.expected}")
    note = ""
    if isinstance(value, str):
        try:
            value = float(value.replace(",", "_") if value.count(",") else value)
        except ValueError:
            raise BadValue("is a text, not a number") from None
        note = "is a text where a number belongs"
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadValue("is not a number")
    return Read(value, note)


def _whole(key: Key, value: Any) -> Read:
    read = _number(key, value)
    if read.value != math.floor(read.value):
        raise BadValue("has a fraction where a whole number belongs")
    if abs(read.value) > _LARGEST_WHOLE:
        raise BadValue("is larger than DeepSpeed takes", f"give {key.expected} below 9.2e18")
    return Read(int(read.value), read.note)


def _choice(key: Key, value: Any) -> Read:
    if isinstance(value, str):
        if value in key.choices:
            return Read(value)
        folded = {choice.lower(): choice for choice in key.choices}
        if value.strip().lower() in folded:
            return Read(folded[value.strip().lower()], "is spelled in a way that DeepSpeed may refuse")
        guess = nearest(value, key.choices)
        raise BadValue("is not known", f'did you mean "{guess}"?' if guess else f"give {key.expected}")
    raise BadValue("is not a text", f"give {key.expected}")


def _text(key: Key, value: Any) -> Read:
    if not isinstance(value, str):
        raise BadValue("is not a text")
    return Read(value)


def _texts(key: Key, value: Any) -> Read:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise BadValue("is not a list of texts")
    if unknown := [item for item in texts if key.choices and item not in key.choices]:
        raise BadValue(f"holds {written(unknown[0])}, which is not known", f"give {key.expected}")
    return Read(texts, "is one text where a list of texts belongs" if isinstance(value, str) else "")


def _anything(key: Key, value: Any) -> Read:
    return Read(value)


_READERS: dict[Kind, Callable[[Key, Any], Read]] = {
    "flag": _flag,
    "whole": _whole,
    "number": _number,
    "text": _text,
    "texts": _texts,
    "choice": _choice,
    "path": _text,
    "anything": _anything,
}
