"""What a screen asks of the app: messages that go up, so that no screen knows another one."""

from __future__ import annotations

from textual.message import Message

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.rundir import RunDir


class RunsAsked(Message):
    """Show the list of runs."""


class MonitorAsked(Message):
    """Watch a run."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id


class StopAsked(Message):
    """End a run, after asking whether to save first."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self.run = run


class LaunchAsked(Message):
    """Start a run; one that is not predicted to fit is asked about first."""

    def __init__(self, spec: RunSpec, prediction: Prediction) -> None:
        super().__init__()
        self.spec = spec
        self.prediction = prediction
