"""Typed reading of Hugging Face configuration keys: every wrong value names its file, key and remedy.

Only the keys that a family asks for are looked at; the many others of a config.json are ignored.
An explicit null counts as absent, as transformers treats it.
"""

from __future__ import annotations

import math
from typing import Any

from llmtop.presets.errors import UsageError, bad_value, nearest

MAX_WIDTH = 524_288
"""No hidden, intermediate or head size of a model that exists comes near this."""
MAX_LAYERS = 2_000
MAX_EXPERTS = 4_096
MAX_VOCABULARY = 16_777_216
MAX_POSITIONS = 1_000_000_000


class ConfigReader:
    """One configuration dictionary and the name of the file that it came from."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.config.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_WIDTH
    ) -> int:
        """A whole number within bounds; a missing one without a default is an error."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise bad_value(self.where, key, _short(value), f"a whole number from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_WIDTH) -> int | None:
        """A whole number within bounds, or None when the key is absent or null."""
        return self.integer(key, minimum=minimum, maximum=maximum) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number of at least zero."""
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad_value(self.where, key, _short(value), "a number")
        if not 0 <= value <= 1e12 or not math.isfinite(value):
            raise bad_value(self.where, key, _short(value), "a finite number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_value(self.where, key, _short(value), "true or false")
        return value

    def word(self, key: str, default: str | None = None) -> str:
        """A text value."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if not isinstance(value, str):
            raise bad_value(self.where, key, _short(value), "a text")
        return value

    def integers(self, key: str, *, maximum: int) -> list[int] | None:
        """A list of whole numbers from 0, or None when the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            type(item) is int and 0 <= item <= maximum for item in value
        ):
            raise bad_value(self.where, key, _short(value), f"a list of whole numbers from 0 to {maximum}")
        return value

    def missing(self, key: str) -> UsageError:
        """The error for a key that the family cannot do without."""
        guess = nearest(key, [k for k in self.config if k != key])
        hint = f"; the nearest key there is '{guess}'" if guess else ""
        return UsageError(
            f"{self.where}: the key '{key}' is missing",
            why=f"the size of the model cannot be known without it{hint}",
            fix=f"add '{key}' with the value from the model's own config.json",
        )

    def contradiction(self, what: str, why: str) -> UsageError:
        """The error for keys that cannot all be true."""
        return UsageError(
            f"{self.where}: {what}", why=why, fix="use the values from the model's own config.json"
        )


def _short(value: object) -> object:
    """The value as far as an error message should show it."""
    text = repr(value)
    return value if len(text) <= 60 else text[:57] + "..."
