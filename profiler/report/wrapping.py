"""Lines of a report that are no wider than the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

_QUANTITY = re.compile(r"(\d) (us|ms|s|B|[KMGTP]iB|tok/s)\b")
"""A number and its unit, which no line break may part."""


def hanging(label: str, text: str, width: int) -> Iterator[str]:
    yield from wrapped(text, width, indent=f"  {label:<16}", hang=" " * 18)


def wrapped(text: str, width: int, *, indent: str = "  ", hang: str = "  ") -> Iterator[str]:
    glued = _QUANTITY.sub("\\1\u00a0\\2", text)
    for line in textwrap.wrap(
        glued, width, initial_indent=indent, subsequent_indent=hang, break_on_hyphens=False
    ):
        yield line.replace("\u00a0", " ")
