"""Edits one value under the list: typed, or chosen from a list that narrows while typing."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import fit, harmless


class Entry(Input):
    """Shows in the footer what Enter does."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "submit", "Take it", key_display="⏎")]


class Editor(Vertical):
    """Hidden until `open`; says each value on the way, so that its effect shows before it is taken."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Leave it", key_display="Esc"),
        Binding("up", "move(-1)", "", show=False),
        Binding("down", "move(1)", "", show=False),
    ]

    class Previewed(Message):
        """This is what Enter would take now."""

        def __init__(self, key: str, value: str) -> None:
            super().__init__()
            self.key = key
            self.value = value

    class Taken(Previewed):
        """A person has taken a value."""

    class Cancelled(Message):
        """The value stays as it was."""

    def __init__(self) -> None:
        super().__init__(id="editor")
        self._key = ""
        self._before = ""
        self._choices: tuple[tuple[str, str], ...] = ()
        self._open_ended = True

    def compose(self) -> ComposeResult:
        yield Entry(compact=True, select_on_focus=True)
        yield OptionList(markup=False, compact=True)

    def open(self, key: str, value: str, choices: tuple[tuple[str, str], ...], open_ended: bool) -> None:
        """Begin to edit `key`; without choices any text will do."""
        self._key, self._before, self._choices = key, value, choices
        self._open_ended = open_ended or not choices
        self.display = True
        entry = self.query_one(Input)
        with entry.prevent(Input.Changed):
            entry.value = value
        self._narrow("", highlight=value)
        entry.focus()

    def close(self) -> None:
        self.display = False

    @property
    def _list(self) -> OptionList:
        return self.query_one(OptionList)

    def _narrow(self, typed: str, highlight: str = "") -> None:
        """List the choices that hold what was typed, those that begin with it first."""
        word = typed.strip().lower()
        hits = [(name, text) for name, text in self._choices if word in name.lower()]
        hits.sort(key=lambda hit: not hit[0].lower().startswith(word))
        with self._list.prevent(OptionList.OptionHighlighted):
            self._list.set_options(
                Option(Content.assemble(fit(name, 22), (f" {harmless(text)}", "$muted")), id=name)
                for name, text in hits
            )
            names = [name for name, _ in hits]
            if names:
                self._list.highlighted = names.index(highlight) if highlight in names else 0
        self._list.display = bool(names)
        refused = bool(typed) and not names and not self._open_ended
        words = (": none of the choices ", "$text-warning") if refused else (" ", "")
        self.border_title = Content.assemble(f" {self._key}", words).visualize()

    @property
    def value(self) -> str:
        """What Enter would take: the choice under the cursor, else the text."""
        typed = self.query_one(Input).value.strip()
        option = self._list.highlighted_option
        looks_like_path = self._open_ended and ("/" in typed or typed.endswith((".json", ".toml")))
        if option is None or option.id is None or looks_like_path:
            return typed
        return option.id

    @property
    def _takes(self) -> bool:
        """Whether the value can be taken: where only the choices will do, it is one of them."""
        return self._open_ended or self._list.highlighted_option is not None

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._narrow(event.value, highlight=self._before)
        if self._takes:
            self.post_message(self.Previewed(self._key, self.value))

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self._takes:
            self.post_message(self.Taken(self._key, self.value))
        else:
            # Back to the whole list: a person sees what there is to choose from.
            self.app.bell()
            self.query_one(Input).value = ""

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Taken(self._key, self.value))

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()

    def action_move(self, by: int) -> None:
        if by > 0:
            self._list.action_cursor_down()
        else:
            self._list.action_cursor_up()
        if self._takes:
            self.post_message(self.Previewed(self._key, self.value))

    def action_cancel(self) -> None:
        self.post_message(self.Cancelled())
