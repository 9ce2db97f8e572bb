"""The keys of every screen, and the marks that a first look does not explain."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from llmtop.tui.keys import Key, help_for
from llmtop.tui.widgets.paint import fit, wrapped
from llmtop.tui.widgets.palette import COMPONENTS

NOTES = (
    "A run belongs to its own supervisor: quitting or losing the terminal changes nothing for it.",
    "Bars: ━ used by this run, ╍ by others, ─ free, ┼ predicted peak.",
    "n/a: the machine does not tell. Nothing is ever guessed.",
)


_KEY_CELLS = 10


class HelpScreen(ModalScreen[None]):
    """Begins with the keys of the screen below it; scrolls; Escape, q or ? closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "Close", key_display="Esc")
    ]

    def __init__(self, title: str = "") -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as box:
            box.border_title = "Help"
            box.border_subtitle = "Esc closes"
            yield Static(markup=False)

    def on_mount(self) -> None:
        self.query_one("#help").focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._paint)

    def _paint(self) -> None:
        width = self.query_one("#help", VerticalScroll).scrollable_content_region.width
        self.query_one("#help Static", Static).update(_text(self._title, max(20, width)))


def _text(first: str, width: int) -> Content:
    rows: list[Content] = []
    for title, keys in help_for(first):
        rows.append(Content.styled(title, "bold $text-primary"))
        rows += [row for key in keys if key.help for row in _rows(key, width)]
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


def _rows(key: Key, width: int) -> list[Content]:
    first, *more = wrapped(key.help, width - _KEY_CELLS)
    head = Content.assemble((fit(f"  {key.display or key.key}", _KEY_CELLS), "bold $text-accent"), first)
    return [head, *(Content(" " * _KEY_CELLS + row) for row in more)]
