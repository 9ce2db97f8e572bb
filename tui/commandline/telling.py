"""What is told to the person who looks: on stderr, in lines that a terminal need not break. Never data.

Every text that the command line writes there goes through `tell`, so that no command has to know how wide
the terminal is. Elsewhere than on a terminal lines stay whole, for `grep` and for what reads a log.
"""

from __future__ import annotations

import re
import sys

WIDEST = 100
NARROWEST = 40

_WHOLE = r"\bllmtop [^\s,;:)]+(?: [^\s,;:)]+)?|(?<!\S)--[a-z][\w-]* [^\s,;:)]+"
"""Words that are copied together: a command with its first arguments, an option with its value."""
_LEAD = r" *(?:(?:why|fix): |\S{1,16}(?: \S{1,16})? {2,})?"
"""The indent of a line and its label, which its later lines stand under."""
_GLUE = "\u00a0"


def tell(text: str) -> None:
    """Write a text to stderr, each of its lines wrapped to the terminal's width."""
    width = stderr_width()
    lines = (
        text.split("\n")
        if width is None
        else [part for line in text.split("\n") for part in fit(line, width)]
    )
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def stderr_width() -> int | None:
    """Columns to keep to; None where no terminal reads."""
    if not sys.stderr.isatty():
        return None
    import shutil  # for a terminal alone: scripts need not wait for it

    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def fit(line: str, width: int) -> list[str]:
    """The line in lines of at most `width` columns, save for what is longer and must stay in one piece."""
    if len(line) <= width:
        return [line]
    match = re.match(_LEAD, line)
    lead = match.group() if match else ""
    hang = " " * (len(lead) if 0 < len(lead) <= width // 2 else 2)
    room = width - len(hang)

    def glue(found: re.Match[str]) -> str:
        words = found.group()
        # A command that is longer than a line is still to be copied in one piece.
        whole = words.startswith("llmtop") or len(words) <= room
        return words.replace(" ", _GLUE) if whole else words

    import textwrap

    glued = re.sub(_WHOLE, glue, line[len(lead) :])
    parts = textwrap.wrap(
        glued,
        width,
        initial_indent=lead,
        subsequent_indent=hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(_GLUE, " ") for part in parts]
