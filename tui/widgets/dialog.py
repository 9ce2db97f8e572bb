"""A question over the screen: a few lines of text and choices, each with its own key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from llmtop.tui.widgets.paint import fit


class Choice(NamedTuple):
    key: str
    label: str
    value: str


class ChoiceDialog(ModalScreen[str]):
    """Ends with the chosen `value`, or with None after Escape, which stands last among the choices.

    Enter takes the marked row, and at first that is the one that changes nothing: a key that is pressed by
    habit ends no run and deletes none.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (11, "-roomy")]

    def __init__(self, title: str, text: Sequence[str], choices: Sequence[Choice], cancel: str) -> None:
        super().__init__()
        self._cancel = cancel
        self._title = title
        self._text = text
        self._choices = {choice.value: choice for choice in choices}

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content(self._title)
            yield Static(Content("\n".join(self._text)), markup=False, id="dialog-text")
            yield OptionList(
                *(
                    Option(_row(choice.key, choice.label), id=value)
                    for value, choice in self._choices.items()
                ),
                Option(_row("Esc", self._cancel)),
                markup=False,
            )
            box.border_subtitle = Content("⏎ takes the marked row")

    def on_mount(self) -> None:
        rows = self.query_one(OptionList)
        rows.highlighted = rows.option_count - 1
        rows.focus()

    def on_key(self, event: events.Key) -> None:
        for value, choice in self._choices.items():
            if event.key == choice.key:
                event.stop()
                self.dismiss(value)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


def _row(key: str, label: str) -> Content:
    return Content.assemble((fit(key, 5), "bold $text-accent"), label)
