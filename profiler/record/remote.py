"""Marks a folder that follows a run on another machine: `remote.json`, written by whoever keeps it alike."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.record.wholefile import document, write_atomic
from llmtop.profiler.units import format_seconds

REMOTE_FILE = "remote.json"
ON_ITS_MACHINE = frozenset(("delete", "mirror", "quantize", "resume", "serve-metrics", "stacks", "weights"))
"""Commands that take no run of another machine: they work on its folder, checkpoints or processes."""


class Remote(Struct, frozen=True, kw_only=True):
    host: str
    """As ssh was told."""
    path: str
    """Of the folder there."""
    alive: bool
    """Whether the run's supervisor lived when the host was heard of last."""
    connected: bool = True
    problem: str = ""
    """Why nothing comes now, as ssh says; empty while something does."""
    lost_at: float | None = None
    """Wall clock here since when nothing comes; None while something does."""
    ahead_seconds: float = 0.0
    """How far its clock is ahead of the one here, where that matters to who reads times of day."""

    def away_words(self, now: float) -> str:
        """That what is shown is old, for how long and why; empty while the connection stands."""
        if self.lost_at is None:
            return ""
        why = f": {self.problem}" if self.problem else ""
        return f"no connection to {self.host} for {format_seconds(max(0.0, now - self.lost_at))}{why}"


def read_remote(folder: Path) -> Remote | None:
    """None for a run of this machine."""
    try:
        return read_json(folder / REMOTE_FILE, Remote)
    except (OSError, msgspec.MsgspecError):
        return None


def time_there(folder: Path) -> float:
    """The time of day by the clock of the machine that has the run, as far as that was measured."""
    remote = read_remote(folder)
    return time.time() + (remote.ahead_seconds if remote is not None else 0.0)


def name_here(folder: Path) -> str:
    """What a run is called in commands on this machine."""
    remote = read_remote(folder)
    return name_for(folder.name, remote.host if remote is not None else "")


def name_for(run_id: str, host: str) -> str:
    """The same; `host`: the machine that has the run, as ssh is told, empty for this one."""
    return f"{host}:{run_id}" if host else run_id


def command_for(run_id: str, host: str, command: str, *words: str) -> str:
    """A command of llmtop for a run, as it is called on this machine.

    `host`: the machine that has the run, as ssh is told; empty for this one. One that works on the run's
    folder or processes is called over there.
    """
    if host and command in ON_ITS_MACHINE:
        return command_there(run_id, host, command, *words)
    return shlex.join(["llmtop", command, name_for(run_id, host), *words])


def command_there(run_id: str, host: str, command: str, *words: str) -> str:
    """One that is called on the machine that has the run."""
    there = ["llmtop", command, run_id, *words]
    # ssh joins its words with spaces for a shell over there, which takes quotes off once more.
    plain = " ".join(there)
    line = shlex.join(there)
    return f"ssh -t {shlex.quote(host)} {plain if line == plain else shlex.quote(line)}"


def command_here(folder: Path, command: str, *words: str) -> str:
    """The same for the run of a folder."""
    remote = read_remote(folder)
    return command_for(folder.name, remote.host if remote is not None else "", command, *words)


def as_called_here(text: str, run_id: str, host: str) -> str:
    """Words that were written on the machine that has the run, with the commands as they are called here."""
    if not host:
        return text
    return re.sub(
        rf"llmtop ([a-z-]+) {re.escape(run_id)}(?![\w-])", lambda m: command_for(run_id, host, m[1]), text
    )


def write_remote(folder: Path, remote: Remote) -> None:
    write_atomic(folder / REMOTE_FILE, document(remote), lasting=False)
