"""Asking where each rank of a run stands, and the answer."""

from __future__ import annotations

from collections.abc import Callable

from textual.message import Message

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import RunDir


class StacksArrived(Message):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class StacksAsked(Message):
    """Whoever asks gets a `StacksArrived` by `reply`."""

    def __init__(self, run: RunDir, state: RunState, reply: Callable[[Message], object]) -> None:
        super().__init__()
        self.run = run
        self.state = state
        self.reply = reply
