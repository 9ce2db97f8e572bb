"""What threads have found out for a plan."""

from __future__ import annotations

from textual.message import Message

from llmtop.presets.resolve import Machine
from llmtop.tui.plans.planning import Draft


class MachineSeen(Message):
    """What this machine has is known."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine


class Traced(Message):
    """The model of a draft that had to wait is traced, or cannot be."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft
