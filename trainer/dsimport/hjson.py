"""Reads Hjson, the dialect in which DeepSpeed reads its configuration files.

On top of JSON: comments (`#`, `//`, `/* */`), trailing or missing commas, keys without quotes, single
quotes, `'''` blocks, strings without quotes to the end of the line, and a root without braces. A key
given twice in one object is an error, as it is in DeepSpeed.
"""

from __future__ import annotations

import re
from typing import Any

_SPACE = " \t\r\n"
_STRUCTURE = "{}[],:"
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 100
"""Far beyond any configuration, far below the interpreter's recursion limit."""


class HjsonError(ValueError):
    """The text is not Hjson; the message names line and column."""


class DuplicateKeyError(HjsonError):
    """A key was given twice in one object."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def loads(text: str) -> Any:
    """The value of an Hjson document. Raises HjsonError."""
    reader = _Reader(text)
    reader.skip()
    value = reader.value(0) if reader.peek() in ("{", "[") else reader.members("", 0)
    reader.skip()
    if reader.peek():
        raise reader.error("something follows the end of the document")
    return value


class _Reader:
    """A position in a text, and what can be read from there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def error(self, what: str, at: int | None = None) -> HjsonError:
        where = self.at if at is None else at
        return HjsonError(f"{self.place(where)}: {what}")

    def place(self, at: int) -> str:
        line = self.text.count("\n", 0, at) + 1
        return f"line {line} column {at - self.text.rfind(chr(10), 0, at)}"

    def skip(self) -> None:
        """Move past blanks and comments."""
        while self.at < len(self.text):
            if self.peek() in _SPACE:
                self.at += 1
            elif self.peek() == "#" or self.peek(2) == "//":
                self.at = self._line_end()
            elif self.peek(2) == "/*":
                end = self.text.find("*/", self.at + 2)
                if end < 0:
                    raise self.error("a comment that begins with /* is never closed")
                self.at = end + 2
            else:
                return

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise self.error("nested too deeply")
        start = self.peek()
        if start == "{":
            self.at += 1
            return self.members("}", depth)
        if start == "[":
            self.at += 1
            return self.elements(depth)
        if self.peek(3) == "'''":
            return self.block()
        if start in ('"', "'"):
            return self.quoted()
        return self.unquoted()

    def members(self, closing: str, depth: int) -> dict[str, Any]:
        """The members of an object up to its brace, or up to the end of the text for a bare root."""
        found: dict[str, Any] = {}
        self.skip()
        while self.peek() != closing:
            if not self.peek():
                raise self.error("the text ends inside an object: a closing } is missing")
            start = self.at
            key = self.key()
            self.skip()
            if self.peek() != ":":
                raise self.error(f"':' expected after the key '{key}'")
            self.at += 1
            self.skip()
            if key in found:
                raise DuplicateKeyError(key, f"{self.place(start)}: the key '{key}' is given twice")
            found[key] = self.value(depth + 1)
            self._separator()
        self.at += len(closing)
        return found

    def elements(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self.skip()
        while self.peek() != "]":
            if not self.peek():
                raise self.error("the text ends inside a list: a closing ] is missing")
            found.append(self.value(depth + 1))
            self._separator()
        self.at += 1
        return found

    def key(self) -> str:
        if self.peek() in ('"', "'"):
            return self.quoted()
        end = self.at
        while end < len(self.text) and self.text[end] not in _STRUCTURE + "\n":
            end += 1
        name = self.text[self.at : end].strip()
        if not name or self.text[end : end + 1] != ":" or any(c in _SPACE for c in name):
            raise self.error("a key was expected here")
        self.at = end
        return name

    def quoted(self) -> str:
        start, quote = self.at, self.peek()
        self.at += 1
        pieces: list[str] = []
        while (char := self.peek()) != quote:
            if not char:
                raise self.error("a string that begins here is never closed", start)
            if char < " ":
                raise self.error("a line break or control character inside a quoted string")
            self.at += 1
            pieces.append(self._escape() if char == "\\" else char)
        self.at += 1
        # Escaped surrogates come in pairs; a lone one is replaced so that the string stays printable.
        return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def block(self) -> str:
        """A ''' block: the indentation of its first line is taken off every line."""
        start = self.at
        indent = start - (self.text.rfind("\n", 0, start) + 1)
        end = self.text.find("'''", start + 3)
        if end < 0:
            raise self.error("a ''' block that begins here is never closed", start)
        self.at = end + 3
        first, *rest = self.text[start + 3 : end].replace("\r", "").split("\n")
        lines = [line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in rest]
        if first.strip(" \t") or not rest:
            lines.insert(0, first.lstrip(" \t"))
        if len(lines) > 1 and not lines[-1]:
            lines.pop()
        return "\n".join(lines)

    def unquoted(self) -> Any:
        """A number, true, false or null; failing that, everything to the end of the line as a string."""
        if not self.peek() or self.peek() in _STRUCTURE:
            raise self.error("a value was expected here")
        line_end = self._line_end()
        ends = re.compile(r"[,}\]#]|//|/\*").search(self.text, self.at, line_end)
        end = ends.start() if ends else line_end
        word = self.text[self.at : end].strip()
        if word in _WORDS:
            self.at = end
            return _WORDS[word]
        if _NUMBER.fullmatch(word):
            self.at = end
            return _number(word)
        rest = self.text[self.at : line_end].strip()
        self.at = line_end
        return rest

    def _separator(self) -> None:
        self.skip()
        if self.peek() == ",":
            self.at += 1
            self.skip()

    def _line_end(self) -> int:
        found = re.compile(r"[\r\n]").search(self.text, self.at)
        return found.start() if found else len(self.text)

    def _escape(self) -> str:
        char = self.peek()
        self.at += 1
        if char in _ESCAPES:
            return _ESCAPES[char]
        digits = self.peek(4)
        if char != "u" or not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise self.error(f"\\{char} is not an escape sequence", self.at - 2)
        self.at += 4
        return chr(int(digits, 16))


def _number(word: str) -> int | float:
    if word.lstrip("-").isdigit():
        # What fits no register becomes a float, so that every integer can be written out again.
        return int(word) if len(word) < 19 else float(word)
    value = float(word)
    return int(value) if value == int(min(max(value, -1e10), 1e10)) and abs(value) < 1e10 else value
