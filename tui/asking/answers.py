"""What came of what was asked for: messages from the threads that did it, to the app."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import RunDir

if TYPE_CHECKING:
    from llmtop.profiler.effects.compare import Comparison
    from llmtop.tui.asking.deletion import Load


class Launched(Message):
    """A run was started, or could not be."""

    def __init__(self, run: RunDir | None, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.run = run
        self.error = error


class StopAnswered(Message):
    """A run's supervisor was asked to end it."""

    def __init__(self, refusal: str | None, error: LlmtopError | None = None, *, words: str = "") -> None:
        """`words`: what was asked for."""
        super().__init__()
        self.words = words
        self.refusal = refusal
        self.error = error


class ChangeAnswered(StopAnswered):
    """A run's supervisor was asked to change it."""


class FixAnswered(Message):
    """A run goes on with a change, or does not."""

    def __init__(self, run: RunDir, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.run = run
        self.error = error


class GoingOnAnswered(Message):
    """What is known of a run that is to go on, or why it cannot."""

    def __init__(self, run: RunDir, state: RunState | None, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.run = run
        self.state = state
        self.error = error


class Weighed(Message):
    """What deleting a run would take away, or why it may not be deleted."""

    def __init__(self, run: RunDir, load: Load | None, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.run = run
        self.load = load
        self.error = error


class Deleted(Weighed):
    """What went."""


class Compared(Message):
    """Two runs were compared, or could not be."""

    def __init__(self, found: Comparison | None, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.found = found
        self.error = error
