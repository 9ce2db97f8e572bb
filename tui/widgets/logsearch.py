"""The lines of a log that a person asked for: of a level, and those that hold what was searched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

from llmtop.tui.widgets.content import Content

_WARNING = re.compile(r"\b(?i:warn(ing)?s?)\b|\b\w+Warning\b")
_ERROR = re.compile(
    r"\b(?i:error|critical|fatal|traceback|exception|panic|abort(ed)?|killed|segfault|out of memory)\b"
    r"|\b\w+(Error|Exception)\b"
)


class Level(IntEnum):
    """What is shown of a log, by how bad a line is at least."""

    ALL = 0
    WARNINGS = 1
    ERRORS = 2


LEVEL_WORDS = {Level.ALL: "", Level.WARNINGS: "warnings and errors only", Level.ERRORS: "errors only"}


def level_of(line: str) -> Level:
    """By the words that libraries write; a line without any is plain."""
    if _ERROR.search(line):
        return Level.ERRORS
    return Level.WARNINGS if _WARNING.search(line) else Level.ALL


def of_level(lines: Sequence[str], level: Level) -> list[int]:
    """Indices of the lines that are at least as bad."""
    return [at for at, line in enumerate(lines) if level == Level.ALL or level_of(line) >= level]


def matches(lines: Sequence[str], query: str) -> list[int]:
    """Indices of the lines that hold `query`; a query in small letters takes capitals too."""
    if not query:
        return []
    if query != query.lower():
        return [at for at, line in enumerate(lines) if query in line]
    return [at for at, line in enumerate(lines) if query in line.lower()]


def marked(line: str, query: str, *, current: bool) -> Content:
    """A line with every place of `query` in it marked."""
    where = line if query != query.lower() else line.lower()
    if len(where) != len(line):
        # Small letters of a few alphabets are longer: then the whole line is marked.
        return Content.styled(line, "reverse")
    style = "bold reverse $accent" if current else "reverse"
    parts: list[str | tuple[str, str]] = []
    at = 0
    while (found := where.find(query, at)) >= 0:
        parts += [line[at:found], (line[found : found + len(query)], style)]
        at = found + len(query)
    return Content.assemble(*parts, line[at:])


def following_match(found: Sequence[int], at: int, by: int) -> int | None:
    """The next match after (`by` 1) or before (-1) a line, going round; None where there is none."""
    if not found:
        return None
    if by > 0:
        return next((line for line in found if line > at), found[0])
    return next((line for line in reversed(found) if line < at), found[-1])
