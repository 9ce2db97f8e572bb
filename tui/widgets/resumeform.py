"""How a run that has ended is to go on: from where, and what that takes, is shown before it starts."""

from __future__ import annotations

from typing import ClassVar

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.goingon import has_all_steps
from llmtop.tui.asking.resuming import ResumeWish, preview_resume
from llmtop.tui.widgets.wordsform import Question, WordsForm


class ResumeForm(WordsForm[ResumeWish]):
    """Ends with how to go on; no words are needed, as the setting stays what it was."""

    ASKS: ClassVar[str] = "Go on with this run"
    CONFIRMS: ClassVar[str] = "Go on with this run so?"
    DOES: ClassVar[str] = "starts it"
    PLACEHOLDER: ClassVar[str] = "key=value ... to change something, or nothing"

    def __init__(self, run: RunDir, state: RunState) -> None:
        super().__init__()
        self._run = run
        self._state = state
        if has_all_steps(state):
            steps = run.spec().options.steps
            self.HINT = (f"It has made all its {steps:,} steps. More of them:", f"steps={2 * steps}")

    def question(self, words: tuple[str, ...]) -> Question[ResumeWish] | None:
        found = preview_resume(self._run, self._state, words)
        return None if found is None else Question(found.lines, found.wish, found.warning)
