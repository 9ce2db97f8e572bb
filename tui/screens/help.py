"""The keys of every screen, and the marks that a first look does not explain."""

from __future__ import annotations

from llmtop.tui.keys import Key, help_for
from llmtop.tui.looks.glyphs import spelt
from llmtop.tui.looks.look import Look
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import fit, wrapped
from llmtop.tui.widgets.palette import COMPONENTS
from llmtop.tui.widgets.sheet import Sheet

NOTES = (
    "A run belongs to its own supervisor: quitting or losing the terminal changes nothing for it.",
    "Bars: ━ used by this run, ╍ by others, ─ free, ┼ predicted peak.",
    "n/a: the machine does not tell. Nothing is ever guessed.",
)


_KEY_CELLS = 10


class HelpScreen(Sheet[None]):
    """Begins with the keys of the screen below it."""

    def __init__(self, title: str = "", *, read_only: bool = False) -> None:
        super().__init__("Help")
        self._first = title
        self._read_only = read_only

    def text(self, width: int) -> Content:
        look = getattr(self.app, "look", Look())
        return _text(self._first, width, self._read_only, look.ascii)


def _text(first: str, width: int, read_only: bool, ascii_alone: bool) -> Content:
    rows: list[Content] = []
    for title, keys in help_for(first):
        rows.append(Content.styled(title, "bold $text-primary"))
        told = [key for key in keys if key.help and not (read_only and key.changes)]
        rows += [row for key in told for row in _rows(key, width, ascii_alone)]
        rows.append(Content(""))
    rows.append(Content.styled("Letters of memory", "bold $text-primary"))
    swatches = list(COMPONENTS.values())
    for at in range(0, len(swatches), 3):
        rows.append(
            Content("".join(fit(f"  {s.letter} {s.label}", 22) for s in swatches[at : at + 3]).rstrip())
        )
    rows.append(Content(""))
    rows += [Content(note) for note in NOTES]
    return Content("\n").join(rows)


def _rows(key: Key, width: int, ascii_alone: bool) -> list[Content]:
    name = key.display or key.key
    name = spelt(name) if ascii_alone else name
    first, *more = wrapped(key.help, width - _KEY_CELLS)
    head = Content.assemble((fit(f"  {name}", _KEY_CELLS), "bold $text-accent"), first)
    return [head, *(Content(" " * _KEY_CELLS + row) for row in more)]
