"""A form over a screen: `key=value ...` is typed, what it comes to stands below, then yes or no."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Generic, NamedTuple, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Static

from llmtop.presets.errors import LlmtopError
from llmtop.tui.widgets.paint import harmless

Wanted = TypeVar("Wanted")

_TYPING = "⏎ shows what it comes to   Esc goes back"
_BACK = "Esc goes back"


class Question(NamedTuple, Generic[Wanted]):
    """What the words come to, before yes is said to it."""

    lines: tuple[str, ...]
    wanted: Wanted
    """What a yes to it is."""
    warning: str = ""
    """Why Enter is not enough, and `y` is asked for; empty where it is."""


class WordsForm(ModalScreen[Wanted], Generic[Wanted]):
    """Ends with what is wanted, or with None.

    Enter on the words asks: only what has been shown can be said yes to, by a key of its own where it is not
    what one would want without knowing. Where no words are needed, what is shown at first is the question.
    """

    ASKS: ClassVar[str]
    """The title while words are typed."""
    CONFIRMS: ClassVar[str]
    """The title of the question."""
    DOES: ClassVar[str]
    """What Enter does then, after `⏎`."""
    PLACEHOLDER: ClassVar[str] = "key=value ..."
    HINT: tuple[str, ...] = ()
    """What can be typed; shown where no words alone are no question."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Cancel"),
        Binding("enter", "say_yes", "", show=False),
        Binding("y", "say_yes_anyway", "", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._asking: Question[Wanted] | None = None
        """What is to be said yes to; None while the words are typed."""
        self._told: Question[Wanted] | None = None
        """What is shown below no words at all, where Enter alone is a yes to it."""

    @abstractmethod
    def question(self, words: tuple[str, ...]) -> Question[Wanted] | None:
        """What the words come to, None where there is nothing to ask; raises LlmtopError for what cannot
        be."""

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog", classes="-form") as box:
            box.border_title = Content(self.ASKS)
            yield Input(placeholder=self.PLACEHOLDER, compact=True, select_on_focus=False)
            with VerticalScroll(id="change-area", can_focus=False):
                yield Static(Content("\n".join(self.HINT)), markup=False, id="change-preview")

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._typed()

    @on(Input.Changed)
    def _typed(self) -> None:
        self._told = None
        try:
            found = self.question(self._words())
        except LlmtopError as error:
            self._show(str(error), "$text-warning")
        else:
            self._show("\n".join(self.HINT if found is None else found.lines))
            if found is not None and not found.warning and not self._words():
                self._told = found
        self._say_keys()

    def _say_keys(self) -> None:
        keys = _TYPING if self._told is None else f"⏎ {self.DOES}   {_BACK}"
        self.query_one("#dialog", Vertical).border_subtitle = Content(keys)

    @on(Input.Submitted)
    def _entered(self) -> None:
        try:
            found = self.question(self._words())
        except LlmtopError as error:
            self._show(str(error), "$text-error")
            return
        if found is not None and found == self._told:
            self.dismiss(found.wanted)
        elif found is not None:
            self._ask(found)

    def _ask(self, found: Question[Wanted]) -> None:
        """From here on the keys answer the question, and scroll what it is about."""
        self._asking = found
        self._show("\n".join(found.lines), "$text-error" if found.warning else "")
        box = self.query_one("#dialog", Vertical)
        box.border_title = Content(self.CONFIRMS)
        keys = f"{found.warning}   Esc back" if found.warning else f"⏎ {self.DOES}   Esc back to the words"
        box.border_subtitle = Content.styled(keys, "bold $text-warning")
        self._turn(self.query_one("#change-area"), self.query_one(Input))

    def action_back(self) -> None:
        if self._asking is None:
            self.dismiss(None)
            return
        self._asking = None
        self.query_one("#dialog", Vertical).border_title = Content(self.ASKS)
        self._say_keys()
        self._turn(self.query_one(Input), self.query_one("#change-area"))

    def _turn(self, to: Widget, away: Widget) -> None:
        to.can_focus, away.can_focus = True, False
        to.focus()

    def action_say_yes(self) -> None:
        if self._asking is None:
            self._entered()  # typed before the box had the focus
        elif not self._asking.warning:
            self.dismiss(self._asking.wanted)

    def action_say_yes_anyway(self) -> None:
        if self._asking is not None and self._asking.warning:
            self.dismiss(self._asking.wanted)

    def _words(self) -> tuple[str, ...]:
        return tuple(self.query_one(Input).value.split())

    def _show(self, text: str, style: str = "") -> None:
        words = "\n".join(harmless(line) for line in text.splitlines())
        self.query_one("#change-preview", Static).update(Content.styled(words, style))
