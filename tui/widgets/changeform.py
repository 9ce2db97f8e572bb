"""A form over the monitor: `key=value ...` is typed, what it comes to stands below, then yes or no."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Static

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.control import SetParams
from llmtop.tui.asking.changetext import Preview, preview_change, preview_lines
from llmtop.tui.widgets.paint import harmless

KEEP = "keep_global_batch="
"""A word of the form alone; no option has it."""
_HINT = (
    "micro_batch=2 gradient_checkpointing=on: between two steps",
    "zero=3 attention=eager: by a relaunch that goes on where it was",
    "keep_global_batch=no: the other size does not follow",
)

_TYPING = "⏎ shows what it comes to   Esc goes back"
_FITS = "⏎ changes the run now   Esc back to the words"
_NO_FIT = "does not fit: y changes it all the same   Esc back"


class ChangeForm(ModalScreen[SetParams]):
    """Ends with the change to ask for, or with None.

    Enter on the words asks: only what has been shown can be said yes to, by a key of its own where it is not
    predicted to fit.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Cancel"),
        Binding("enter", "change", "Change", show=False),
        Binding("y", "change_anyway", "Change", show=False),
    ]

    def __init__(self, run: RunDir, state: RunState) -> None:
        super().__init__()
        self._run = run
        self._state = state
        self._asking: Preview | None = None
        """What the question is about; None while the words are typed."""

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog", classes="-form") as box:
            box.border_title = Content("Change this run")
            box.border_subtitle = Content(_TYPING)
            yield Input(placeholder="key=value ...", compact=True, select_on_focus=False)
            with VerticalScroll(id="change-area", can_focus=False):
                yield Static(Content("\n".join(_HINT)), markup=False, id="change-preview")

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _typed(self) -> None:
        words = self._words()
        if not words:
            self._show("\n".join(_HINT))
            return
        try:
            self._show("\n".join(preview_lines(self._preview(words))))
        except LlmtopError as error:
            self._show(str(error), "$text-warning")

    @on(Input.Submitted)
    def _entered(self) -> None:
        words = self._words()
        try:
            preview = self._preview(words) if words else None
        except LlmtopError as error:
            self._show(str(error), "$text-error")
            return
        if preview is not None:
            self._ask(preview)

    def _ask(self, preview: Preview) -> None:
        """From here on the keys answer the question, and scroll what it is about."""
        self._asking = preview
        fits = preview.plan.new_prediction.fits is not False
        self._show("\n".join(preview_lines(preview)), "" if fits else "$text-error")
        box = self.query_one("#dialog", Vertical)
        box.border_title = Content("Change this run so?")
        box.border_subtitle = Content.styled(_FITS if fits else _NO_FIT, "bold $text-warning")
        self._turn(self.query_one("#change-area"), self.query_one(Input))

    def action_back(self) -> None:
        if self._asking is None:
            self.dismiss(None)
            return
        self._asking = None
        box = self.query_one("#dialog", Vertical)
        box.border_title = Content("Change this run")
        box.border_subtitle = Content(_TYPING)
        self._turn(self.query_one(Input), self.query_one("#change-area"))

    def _turn(self, to: Widget, away: Widget) -> None:
        to.can_focus, away.can_focus = True, False
        to.focus()

    def action_change(self) -> None:
        if self._asking is not None and self._asking.plan.new_prediction.fits is not False:
            self.dismiss(self._asked(force=False))

    def action_change_anyway(self) -> None:
        if self._asking is not None and self._asking.plan.new_prediction.fits is False:
            self.dismiss(self._asked(force=True))

    def _preview(self, words: tuple[str, ...]) -> Preview:
        return preview_change(self._run, self._state, list(words), keep_global_batch=self._keeps)

    def _typed_words(self) -> list[str]:
        return self.query_one(Input).value.split()

    @property
    def _keeps(self) -> bool:
        """Whether the global batch is kept."""
        keep = [word.removeprefix(KEEP) for word in self._typed_words() if word.startswith(KEEP)]
        return keep[-1:] != ["no"]

    def _words(self) -> tuple[str, ...]:
        return tuple(word for word in self._typed_words() if not word.startswith(KEEP))

    def _asked(self, *, force: bool) -> SetParams:
        return SetParams(words=self._words(), keep_global_batch=self._keeps, force=force)

    def _show(self, text: str, style: str = "") -> None:
        words = "\n".join(harmless(line) for line in text.splitlines())
        self.query_one("#change-preview", Static).update(Content.styled(words, style))
