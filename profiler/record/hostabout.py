"""What a host says of itself before anything is started on it: `hosts/NAME/host.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.record.hosts import HostDir
from llmtop.profiler.record.wholefile import document, write_atomic


class HostAbout(Struct, frozen=True, kw_only=True):
    """None: could not be told."""

    node: str
    """What the machine calls itself."""
    pid: int
    """Of its supervisor."""
    python: str
    versions: dict[str, str] = {}
    """Of the packages that ranks of different hosts must have alike."""
    address: str = ""
    """By which the other hosts reach it."""
    cpus: int | None = None
    """That its processes may use."""
    memory_bytes: int | None = None
    """The same, with the limit of the cgroup."""
    gpus: int | None = None
    """Visible ones."""
    problem: str = ""
    """Why the run cannot start there; empty when it can."""
    fix: str = ""


def _path(host: HostDir) -> Path:
    return host.own_path / "host.json"


def write_about(host: HostDir, about: HostAbout) -> None:
    write_atomic(_path(host), document(about))


def forget_about(host: HostDir) -> None:
    """What an earlier supervisor of the host has said."""
    _path(host).unlink(missing_ok=True)


def read_about(host: HostDir, *, pid: int | None = None) -> HostAbout | None:
    """None while there is none; with `pid` one of another process counts as none."""
    try:
        about = read_json(_path(host), HostAbout)
    except (OSError, msgspec.MsgspecError):
        return None
    return about if pid in (None, about.pid) else None
