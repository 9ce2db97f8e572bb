"""The keys of every screen, and the marks that a first look does not explain."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from llmtop.tui.keys import HELP, Key
from llmtop.tui.widgets.paint import fit
from llmtop.tui.widgets.palette import COMPONENTS

NOTES = (
    "A run belongs to its own supervisor: quitting or losing the terminal changes nothing for it.",
    "Bars: ━ used by this run, ╍ by others, ─ free, ┼ predicted peak.",
    "n/a: the machine does not tell. Nothing is ever guessed.",
)


class HelpScreen(ModalScreen[None]):
    """Scrolls; Escape, q or ? closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "Close", key_display="Esc")
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as box:
            box.border_title = "Help"
            box.border_subtitle = "Esc closes"
            yield Static(_text(), markup=False)

    def on_mount(self) -> None:
        self.query_one("#help").focus()


def _text() -> Content:
    rows: list[Content] = []
    for title, keys in HELP:
        rows.append(Content.styled(title, "bold $text-primary"))
        rows += [_row(key) for key in keys if key.help]
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


def _row(key: Key) -> Content:
    return Content.assemble((fit(f"  {key.display or key.key}", 10), "bold $text-accent"), key.help)
