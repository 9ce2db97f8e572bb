"""A form over the monitor: `key=value ...` is typed, and what it comes to stands below on the way."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
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

_NO_FIT = "It is predicted not to fit: ⏎ once more changes it all the same."


class ChangeForm(ModalScreen[SetParams]):
    """Ends with the change to ask for, or with None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel")]

    def __init__(self, run: RunDir, state: RunState) -> None:
        super().__init__()
        self._run = run
        self._state = state
        self._force = False
        """Enter was pressed once on a change that is not predicted to fit."""

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog", classes="-form") as box:
            box.border_title = Content("Change this run")
            yield Input(placeholder="key=value ...", compact=True)
            yield Static(Content("\n".join(_HINT)), markup=False, id="change-preview")
            yield Static(Content.styled("⏎ changes it   Esc goes back", "$muted"), id="change-keys")

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _typed(self) -> None:
        self._force = False
        asked = self._asked()
        if not asked.words:
            self._show("\n".join(_HINT))
            return
        try:
            self._show("\n".join(preview_lines(self._preview(asked))))
        except LlmtopError as error:
            self._show(str(error), "$text-warning")

    @on(Input.Submitted)
    def _taken(self) -> None:
        asked = self._asked()
        try:
            preview = self._preview(asked) if asked.words else None
        except LlmtopError as error:
            self._show(str(error), "$text-error")
            return
        if preview is None:
            return
        if preview.plan.new_prediction.fits is False and not self._force:
            self._force = True
            told = "\n".join(preview_lines(preview))
            self._show(f"{told}\n{_NO_FIT}", "$text-error")
            return
        self.dismiss(asked)

    def _preview(self, asked: SetParams) -> Preview:
        return preview_change(
            self._run, self._state, list(asked.words), keep_global_batch=asked.keep_global_batch
        )

    def _asked(self) -> SetParams:
        words = self.query_one(Input).value.split()
        keep = [word.removeprefix(KEEP) for word in words if word.startswith(KEEP)]
        return SetParams(
            words=tuple(word for word in words if not word.startswith(KEEP)),
            keep_global_batch=keep[-1:] != ["no"],
            force=self._force,
        )

    def _show(self, text: str, style: str = "") -> None:
        words = "\n".join(harmless(line) for line in text.splitlines())
        self.query_one("#change-preview", Static).update(Content.styled(words, style))
