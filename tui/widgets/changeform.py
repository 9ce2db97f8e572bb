"""What is to be changed of a run that goes on: what it comes to is shown before it is asked for."""

from __future__ import annotations

from typing import ClassVar

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.control import SetParams
from llmtop.tui.asking.changetext import preview_change, preview_lines
from llmtop.tui.widgets.wordsform import Question, WordsForm

KEEP = "keep_global_batch="
"""A word of the form alone; no option has it."""


class ChangeForm(WordsForm[SetParams]):
    """Ends with the change to ask for."""

    ASKS: ClassVar[str] = "Change this run"
    CONFIRMS: ClassVar[str] = "Change this run so?"
    DOES: ClassVar[str] = "changes the run now"
    HINT: tuple[str, ...] = (
        "micro_batch=2 gradient_checkpointing=on: between two steps",
        "zero=3 attention=eager: by a relaunch that goes on where it was",
        "keep_global_batch=no: the other size does not follow",
    )

    def __init__(self, run: RunDir, state: RunState) -> None:
        super().__init__()
        self._run = run
        self._state = state

    def question(self, words: tuple[str, ...]) -> Question[SetParams] | None:
        changing = _changing(words)
        if not changing:
            return None
        preview = preview_change(self._run, self._state, list(changing), keep_global_batch=_keeps(words))
        misfit = preview.misfit
        wanted = SetParams(words=changing, keep_global_batch=_keeps(words), force=bool(misfit))
        warning = f"{misfit.words}: y changes it all the same" if misfit else ""
        return Question(tuple(preview_lines(preview)), wanted, warning)


def _changing(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.startswith(KEEP))


def _keeps(words: tuple[str, ...]) -> bool:
    """Whether the global batch is kept."""
    keep = [word.removeprefix(KEEP) for word in words if word.startswith(KEEP)]
    return keep[-1:] != ["no"]
