"""Marks a folder that follows a run on another machine: `remote.json`, written by whoever keeps it alike."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.record.wholefile import document, write_atomic
from llmtop.profiler.units import format_seconds

REMOTE_FILE = "remote.json"


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
    return folder.name if remote is None else f"{remote.host}:{folder.name}"


def write_remote(folder: Path, remote: Remote) -> None:
    write_atomic(folder / REMOTE_FILE, document(remote), lasting=False)
