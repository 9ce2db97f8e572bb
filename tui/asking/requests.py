"""What a screen asks of the app: messages that go up, so that no screen knows another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from textual.message import Message
from textual.screen import Screen

from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.hosts import HostDir, Hosts
from llmtop.profiler.record.rundir import RunDir


class ReplayWish(Struct, frozen=True, kw_only=True):
    """How a replay begins."""

    speed: int = 10
    """Seconds of the run in one of the viewer."""
    step: int | None = None
    """None: at the beginning, and playing; else held at that step."""


class RunsAsked(Message):
    """Show the list of runs."""


class RunsChanged(Message):
    """The list of runs is to be read again now."""


class MonitorAsked(Message):
    """Watch a run."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id


class PartAsked(Message):
    """Watch a part of a run over hosts: one host, or one rank of it."""

    def __init__(self, run: RunDir, hosts: Hosts, host: str, rank: int | None = None) -> None:
        super().__init__()
        self.run = run
        self.hosts = hosts
        self.host = host
        self.rank = rank


class PartCame(Message):
    """What was asked for of a part of a run on another machine is here."""

    def __init__(self, part: HostDir, asked_on: Screen[Any], problem: str) -> None:
        """`problem`: why it may be old, in words; empty where it is not."""
        super().__init__()
        self.part = part
        self.asked_on = asked_on
        self.problem = problem


class ReplayAsked(Message):
    """Show a run again as it was recorded."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id


class StopAsked(Message):
    """End a run, after asking whether to save first."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self.run = run


class ChangeWanted(Message):
    """Change a run that goes on, after asking how."""

    def __init__(self, run: RunDir, state: RunState) -> None:
        super().__init__()
        self.run = run
        self.state = state


class SnapshotWanted(Message):
    """Look closer at a run that goes on, after asking how."""

    def __init__(self, run: RunDir, state: RunState) -> None:
        super().__init__()
        self.run = run
        self.state = state


class FixAsked(Message):
    """Go on with a run that ran out of memory, after asking with which change."""

    def __init__(self, run: RunDir, state: RunState) -> None:
        super().__init__()
        self.run = run
        self.state = state


class ResumeWanted(Message):
    """Go on with a run that has ended, after showing from where."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self.run = run


class DeleteAsked(Message):
    """Delete a run that has ended, after saying what would go."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self.run = run


class CompareAsked(Message):
    """Show two runs side by side."""

    def __init__(self, first: RunDir, second: RunDir) -> None:
        super().__init__()
        self.first = first
        self.second = second


class TuneAsked(Message):
    """Search for the fastest setting around a run; `taken` gets the change that a person takes, or None."""

    def __init__(self, spec: RunSpec, taken: Callable[[Mapping[str, Any] | None], None]) -> None:
        super().__init__()
        self.spec = spec
        self.taken = taken


class LaunchAsked(Message):
    """Start a run, after showing what would be started."""

    def __init__(
        self,
        spec: RunSpec,
        prediction: Prediction,
        command: str = "",
        visible_devices: str = "",
        notes: tuple[str, ...] = (),
        *,
        host_limit_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.prediction = prediction
        self.command = command
        """The same in a shell."""
        self.visible_devices = visible_devices
        """As in CUDA_VISIBLE_DEVICES; empty: what there is."""
        self.notes = notes
        """What a person should know before."""
        self.host_limit_bytes = host_limit_bytes
        """What a run can use of the host's memory; None where that is not known or does not matter."""
