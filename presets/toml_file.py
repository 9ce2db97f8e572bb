"""Reads one preset TOML file strictly: syntax, keys and values are errors that name file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from llmtop.presets.errors import UsageError, bad_value, unknown_key
from llmtop.presets.foreign import read_bytes, why_unreadable
from llmtop.presets.plain_toml import plain_toml

_LARGEST_BYTES = 1 << 20
"""A preset has some kilobytes; Python's own reader takes its time with what is larger."""
T = TypeVar("T")


class TomlFile:
    """A parsed file that still knows on which line each key stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._text = read_bytes(path, _LARGEST_BYTES).decode("utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be read", why=why_unreadable(error)) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not a text file in UTF-8", why=error.reason) from error
        plain = plain_toml(self._text)
        self.values: dict[str, Any] = self._parsed() if plain is None else plain

    def _parsed(self) -> dict[str, Any]:
        """By Python's own reader, which is slow to load."""
        import tomllib

        path = self.path
        try:
            return tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            message = str(error)
            line = re.search(r"at line (\d+)", message)
            where = f"{path}:{line.group(1)}" if line else f"{path}:{self._text.count(chr(10)) + 1}"
            raise UsageError(f"{where}: not valid TOML", why=message) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not valid TOML", why=str(error).splitlines()[0]) from error

    def where(self, key: str) -> str:
        """The file and, where it can be found, the line of a top-level or table key."""
        plain = f"\n{self._text}".find(f"\n{key} = ")
        if plain >= 0:
            return f"{self.path}:{self._text.count(chr(10), 0, plain) + 1}"
        pattern = rf'^\s*(?:\[\s*)?["\']?{re.escape(key)}["\']?\s*(?:=|\.|\])'
        found = re.search(pattern, self._text, flags=re.MULTILINE)
        return (
            f"{self.path}:{self._text.count(chr(10), 0, found.start() + 1) + 1}" if found else str(self.path)
        )

    def require_known(self, known: Iterable[str], values: dict[str, Any] | None = None) -> None:
        """Raises for the first key that nothing reads."""
        names = set(known)
        for key in self.values if values is None else values:
            if key not in names:
                raise unknown_key(self.where(key), key, names)

    def text(self, key: str, default: str | None = None) -> str:
        """A text value; raises when it is missing without a default, or something else."""
        value = self.values.get(key, default)
        if value is None:
            raise UsageError(f"{self.path}: the key '{key}' is missing", fix=f'add {key} = "..."')
        if not isinstance(value, str):
            raise bad_value(self.where(key), key, value, "a text")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A table; an absent one is empty."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise bad_value(self.where(key), key, value, f"a table: [{key}]")
        return value

    def convert(self, values: dict[str, Any], kind: type[T]) -> T:
        """The struct that the values make; raises with the key that does not fit."""
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            path = re.search(r"`\$\.([^`.\[]+)", str(error))
            key = path.group(1) if path else ""
            where = self.where(key) if key else str(self.path)
            raise UsageError(f"{where}: {key or 'the file'} is not valid", why=str(error)) from error
