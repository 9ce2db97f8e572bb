"""Marks a folder that follows a run on another machine: `remote.json`, written by whoever keeps it alike."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.record.wholefile import document, write_atomic

_NAME = "remote.json"


class Remote(Struct, frozen=True, kw_only=True):
    host: str
    """As ssh was told."""
    path: str
    """Of the folder there."""
    alive: bool
    """Whether the run's supervisor lived when the host was heard of last."""
    connected: bool = True


def read_remote(folder: Path) -> Remote | None:
    """None for a run of this machine."""
    try:
        return read_json(folder / _NAME, Remote)
    except (OSError, msgspec.MsgspecError):
        return None


def write_remote(folder: Path, remote: Remote) -> None:
    write_atomic(folder / _NAME, document(remote), lasting=False)
