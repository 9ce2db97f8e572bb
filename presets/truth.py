"""What a value of a raw DeepSpeed key says as a switch: what pydantic reads, and blanks around a word.

DeepSpeed reads some of its switches by pydantic, and others as Python does, where any text is true: a launch
hands it each of them as it is read here.
"""

from __future__ import annotations

_TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})


def truth(value: object) -> bool | None:
    """Whether a switch of that value is on; None for what is neither true nor false."""
    if isinstance(value, str):
        word = value.strip().lower()
        return word in _TRUE_WORDS if word in _TRUE_WORDS | _FALSE_WORDS else None
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None


def is_true(value: object) -> bool:
    return truth(value) is True


def is_false(value: object) -> bool:
    """Whether it says so: not for a key that is absent."""
    return truth(value) is False


def is_off(value: object) -> bool:
    """Whether it is false or leaves the key to its default."""
    return value is None or value == "auto" or is_false(value)


def asks(value: object) -> bool:
    """Whether it asks for anything: a table or a list by what is in it."""
    return not is_off(value) and value not in ({}, [])
