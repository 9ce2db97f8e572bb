"""What is left of a run whose supervisor is gone: its processes, found by the mark in their environment."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.processidentity import ProcessIdentity, process_identity
from llmtop.profiler.record.rundir import RunDir

RUN_MARK = "LLMTOP_RUN_ID"
"""The variable that every process of a run carries, whoever started it there."""


class Left(Struct, frozen=True, kw_only=True):
    pids: tuple[int, ...] = ()
    """In ascending order."""
    command: str = ""
    """Of a script, as a shell takes it; empty for a run of llmtop's own trainer."""
    watched_pid: int | None = None
    """Of a script that somebody else had started: its process, which `pids` names while it is there."""


class Leftovers:
    """Looks for them once, by all processes of the machine, and from then on at those alone."""

    def __init__(self, run: RunDir) -> None:
        try:
            script = run.spec().script
        except LlmtopError:
            script = None
        self._script = script
        watched = script.pid if script is not None else None
        pids = marked_pids(run.run_id) if watched is None else [watched]
        known = [one for pid in pids if (one := process_identity(pid)) is not None]
        self._found = [one for one in known if watched is None or _began_before(one, run)]

    def look(self) -> Left:
        self._found = [one for one in self._found if one.alive]
        pids = tuple(one.pid for one in self._found)
        script = self._script
        if script is None:
            return Left(pids=pids)
        return Left(pids=pids, command=shlex.join(script.command), watched_pid=script.pid)


def marked_pids(run_id: str, proc: Path = Path("/proc")) -> list[int]:
    """Processes that carry the run's mark, without this one and those of other users."""
    mark, found = f"{RUN_MARK}={run_id}".encode(), []
    for entry in proc.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in variables.split(b"\0"):
            found.append(int(entry.name))
    return sorted(found)


def _began_before(one: ProcessIdentity, run: RunDir) -> bool:
    """Whether it was there when the run was made: a later process may have been given its number."""
    made = run.created()
    return made is not None and one.began <= made
