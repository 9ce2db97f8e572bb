"""Printing that several commands share: one JSON object, and aligned columns of text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from llmtop.presets.errors import written

_T = TypeVar("_T")
WIDTH = 100
"""Columns of text that goes to a file or a pipe, and the most that a terminal's text takes."""
NARROWEST = 40


def text_width() -> int:
    """Columns to keep to: the terminal's, where a terminal reads."""
    if not sys.stdout.isatty():
        return WIDTH
    import shutil  # for a terminal alone: scripts need not wait for it

    return max(NARROWEST, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def short_path(path: str) -> str:
    """A path as short as it stays findable: within the built-in presets, or from home."""
    from llmtop.presets import presetfiles

    file = Path(path)
    if file.is_relative_to(presetfiles.BUILT_IN):
        return f"built-in {file.relative_to(presetfiles.BUILT_IN)}"
    home = Path.home()
    return f"~/{file.relative_to(home)}" if file.is_relative_to(home) else path


def wrapped(text: str, lead: str, width: int) -> list[str]:
    """Lines of at most `width` columns, save for a word that is longer itself; later ones are indented."""
    if text and text.isprintable() and not text.endswith(" ") and len(lead) + len(text) <= width:
        return [lead + text]  # as most are: what follows would find the same, in ten times the time
    import textwrap

    return textwrap.wrap(
        text,
        width,
        initial_indent=lead,
        subsequent_indent=" " * max(4, len(lead)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def option_lines(text: str, lead: str, width: int) -> list[str]:
    """Command-line words, an option never parted from its value."""
    words = text.split(" ")
    glued = words[0]
    for before, word in pairwise(words):
        is_value = len(before) > 2 and before.startswith("--") and not word.startswith("--")
        glued += ("\u00a0" if is_value else " ") + word
    return [line.replace("\u00a0", " ") for line in wrapped(glued, lead, width)]


def value_text(value: object) -> str:
    """A value of an option as somebody would type it: true, none, 1e-5."""
    if isinstance(value, str):
        return value
    return "none" if value is None else written(value)


def named_lines(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Names in a column, each with its text wrapped beside it."""
    column = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        lead = f"  {name:<{column}}  "
        yield from wrapped(text, lead, width) or [lead.rstrip()]


def print_json(value: object) -> None:
    """Indented, so that a person can read it too; keys in the order of the struct."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def without_secrets(told: _T) -> _T:
    """The same struct as it may be shown: a command of the user's own may have a password among its words."""
    from llmtop.profiler.export.secrets import Scrubber
    from llmtop.profiler.report.pagedata import scrubbed

    return scrubbed(Scrubber(os.environ), told)


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with columns padded to the widest cell; the columns named in `right` end aligned."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
