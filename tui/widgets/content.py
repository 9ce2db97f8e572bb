"""Text with styles, as panels say it: without the toolkit, which takes longer to load than a run to read.

A widget shows it as Textual's own content; the first picture of the monitor writes it to the terminal itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from textual.content import Content as Visual

Span = tuple[int, int, str]
"""From which character to before which, and the style: words of the theme as `bold $text-error`."""

_ALIKE = " -~\xa0-\xac\xae-\u02ff\u2010-\u2027\u2190-\u2193\u23ce\u2500-\u25fc\u2713\u2717\u2800-\u28ff"
_UNLIKE = re.compile(f"[^{_ALIKE}]")
"""Any character that may take no cell or two."""


def _is_plain(text: str) -> bool:
    """Whether each character takes one cell."""
    return (text.isascii() and text.isprintable()) or _UNLIKE.search(text) is None


def cell_len(text: str) -> int:
    """Cells of a terminal that the text takes."""
    if _is_plain(text):
        return len(text)
    from rich.cells import cell_len as measured

    return measured(text)


def set_cell_size(text: str, cells: int) -> str:
    """The text cut or padded on the right to as many cells."""
    if _is_plain(text):
        return text[: max(0, cells)].ljust(cells)
    from rich.cells import set_cell_size as sized

    return sized(text, cells)


class Content:
    """Immutable."""

    __slots__ = ("plain", "spans")

    def __init__(self, text: str = "", spans: tuple[Span, ...] = ()) -> None:
        self.plain, self.spans = text, spans

    @classmethod
    def styled(cls, text: str, style: str = "") -> Self:
        return cls(text, ((0, len(text), style),) if style and text else ())

    @classmethod
    def assemble(cls, *parts: Content | str | tuple[str, str]) -> Self:
        """One after the other: a text, a text and its style, or content."""
        texts: list[str] = []
        spans: list[Span] = []
        at = 0
        for part in parts:
            if isinstance(part, Content):
                text = part.plain
                spans += [(at + start, at + end, style) for start, end, style in part.spans]
            elif isinstance(part, str):
                text = part
            else:
                text, style = part
                if style and text:
                    spans.append((at, at + len(text), style))
            texts.append(text)
            at += len(text)
        return cls("".join(texts), tuple(spans))

    def join(self, parts: Iterable[Content]) -> Content:
        """All of them, with this between each two."""
        between: list[Content] = []
        for part in parts:
            between += (self, part) if between else (part,)
        return Content.assemble(*between)

    def __str__(self) -> str:
        return self.plain

    def __bool__(self) -> bool:
        return bool(self.plain)

    def __add__(self, other: Content | str) -> Content:
        return Content.assemble(self, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and (self.plain, self.spans) == (other.plain, other.spans)

    def __hash__(self) -> int:
        return hash((self.plain, self.spans))

    @property
    def cell_length(self) -> int:
        return cell_len(self.plain)

    def truncate(self, width: int, *, ellipsis: bool = False) -> Content:
        """At most `width` cells of it."""
        if self.cell_length <= width:
            return self
        kept = set_cell_size(self.plain, width - 1) + "…" if ellipsis else set_cell_size(self.plain, width)
        return Content(kept, _between(self.spans, 0, len(kept)))

    def stylize(self, style: str) -> Content:
        """All of it in one style more."""
        return Content(self.plain, (*self.spans, (0, len(self.plain), style)))

    def rows(self) -> list[Content]:
        """Its lines."""
        found, at = [], 0
        for line in self.plain.split("\n"):
            found.append(self.part(at, at + len(line)))
            at += len(line) + 1
        return found

    def part(self, begin: int, end: int) -> Content:
        """From a character to before another one."""
        return Content(self.plain[begin:end], _between(self.spans, begin, end))

    def get_height(self, width: int) -> int:
        """Rows that it takes where lines are wrapped to `width` cells."""
        if "\t" not in self.plain and all(cell_len(line) <= width for line in self.plain.split("\n")):
            return self.plain.count("\n") + 1
        return self.visualize().get_height({}, width)

    def visualize(self, widget: object = None, obj: object = None) -> Visual:
        """As Textual shows it, which calls this by itself wherever it takes content."""
        from textual.content import Content as Shown
        from textual.content import Span as ShownSpan

        return Shown(self.plain, [ShownSpan(*span) for span in self.spans])


def _between(spans: tuple[Span, ...], first: int, end: int) -> tuple[Span, ...]:
    return tuple(
        (max(begin, first) - first, min(stop, end) - first, style)
        for begin, stop, style in spans
        if begin < end and stop > first
    )
