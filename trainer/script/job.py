"""The processes of a script: launched by llmtop, or found running and only looked at."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from llmtop.presets.spec import Script
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.script.hookenv import script_environment
from llmtop.trainer.supervisor.ranks import RankExit, Ranks

_EXEC_SECONDS = 1.0
_EXEC_PAUSE_SECONDS = 0.01
COMMAND = 0
"""Number under which the command itself is kept, and whose log is its output."""


class Job(Protocol):
    @property
    def alive(self) -> dict[int, int]:
        """`COMMAND` to its pid, while it lives."""
        ...

    def begin(self) -> None: ...

    def reap(self) -> list[RankExit]:
        """How it ended, once, after it has."""
        ...

    def signal(self, number: signal.Signals) -> None: ...

    def kill(self) -> None: ...

    def sweep(self) -> tuple[int, ...]:
        """End what is left of it; pids that resist."""
        ...


def job_of(run: RunDir, script: Script, environment: Mapping[str, str]) -> Job:
    if script.pid is not None:
        return Observed(script.pid)
    return Launched(run, script, environment)


class Launched:
    """A child of the supervisor, with all that it starts."""

    def __init__(self, run: RunDir, script: Script, environment: Mapping[str, str]) -> None:
        self._run, self._script, self._environment = run, script, environment
        self._processes = Ranks()

    @property
    def alive(self) -> dict[int, int]:
        return self._processes.alive

    def begin(self) -> None:
        environment = script_environment(self._run, self._environment)
        self._processes.start(COMMAND, self._script.command, environment, self._run.log_path(COMMAND))

    def reap(self) -> list[RankExit]:
        return self._processes.reap()

    def signal(self, number: signal.Signals) -> None:
        self._processes.signal(number)

    def kill(self) -> None:
        self._processes.kill()

    def sweep(self) -> tuple[int, ...]:
        return self._processes.sweep()[1]


class Observed:
    """Somebody else's process. Nothing is done to it, whatever happens here."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._identity = process_identity(pid)
        self._told = False

    @property
    def alive(self) -> dict[int, int]:
        there = self._identity is not None and self._identity.alive
        return {COMMAND: self._pid} if there else {}

    def begin(self) -> None:
        """It runs already."""

    def reap(self) -> list[RankExit]:
        if self._told or self.alive:
            return []
        self._told = True
        # No exit code: only its parent is told that.
        return [RankExit(rank=COMMAND, pid=self._pid)]

    def signal(self, number: signal.Signals) -> None:
        """A signal to llmtop is none to it."""

    def kill(self) -> None:
        """It is not ours to end."""

    def sweep(self) -> tuple[int, ...]:
        return ()


def command_line(pid: int) -> tuple[str, ...]:
    """The words that a process was started with; empty where they cannot be read.

    A process that has begun this moment has none for a while: that is waited for.
    """
    end = time.monotonic() + _EXEC_SECONDS
    while True:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
        except OSError:
            return ()
        if words or time.monotonic() >= end:
            return tuple(os.fsdecode(word) for word in words.split(b"\0") if words)
        time.sleep(_EXEC_PAUSE_SECONDS)
