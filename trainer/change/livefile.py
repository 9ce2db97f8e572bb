"""What the supervisor asks of running ranks: one file in the run's folder, which each looks at after a step.

One change is under way at a time, so ranks that have seen a number have all seen the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotKind
from llmtop.profiler.record.wholefile import write_atomic


class LiveRequest(Struct, frozen=True, kw_only=True):
    setting: int
    """Number of the setting to go over to."""
    leave: bool = False
    """Save and end after the step; the setting is taken by a relaunch."""
    folder: str = ""
    """Where to save then, from the run's folder on."""


def ask_ranks(run: RunDir, request: LiveRequest) -> None:
    write_atomic(run.live_path, msgspec.json.encode(request))


def forget_request(run: RunDir) -> None:
    """Before ranks are started: what the earlier ones were asked is not meant for them."""
    run.live_path.unlink(missing_ok=True)


class SaveRequest(Struct, frozen=True, kw_only=True):
    """A checkpoint after the step that the ranks are in; the training goes on."""

    number: int
    """Counted from 1 for each start of the ranks."""


def ask_to_save(run: RunDir, number: int) -> None:
    write_atomic(run.save_path, msgspec.json.encode(SaveRequest(number=number)))


def forget_saves(run: RunDir) -> None:
    """Before ranks are started, as `forget_request`."""
    run.save_path.unlink(missing_ok=True)


class SnapshotRequest(Struct, frozen=True, kw_only=True):
    """Look closely at coming steps; the training goes on."""

    number: int
    """Counted from 1 for each start of the supervisor."""
    what: SnapshotKind
    ranks: tuple[int, ...]
    """Those that write; for the others the steps are marked as not of the usual pace."""
    step: int = 0
    """The first, if the run is not beyond it; 0: the next."""
    steps: int = 1
    with_stacks: bool = False
    stem: str = ""
    """Of the files' names."""


def ask_for_snapshot(run: RunDir, request: SnapshotRequest) -> None:
    write_atomic(run.snapshot_request_path, msgspec.json.encode(request), lasting=False)


def forget_snapshots(run: RunDir) -> None:
    """Before ranks are started, as `forget_request`."""
    run.snapshot_request_path.unlink(missing_ok=True)


_Request = TypeVar("_Request", LiveRequest, SaveRequest, SnapshotRequest)


class AskedFile(Generic[_Request]):
    """A rank's view of such a file. Looking at it costs a system call while nothing changes."""

    def __init__(self, path: Path, kind: type[_Request]) -> None:
        self._path = path
        self._kind: type[_Request] = kind
        self._seen: tuple[int, int] | None = None
        self._newest: _Request | None = None

    def newest(self) -> _Request | None:
        try:
            status = self._path.stat()
            if (status.st_mtime_ns, status.st_ino) != self._seen:
                self._newest = read_json(self._path, self._kind, own=True)
                self._seen = (status.st_mtime_ns, status.st_ino)
        except (OSError, msgspec.MsgspecError):
            # Not there, not readable now, or not the supervisor's: a training does not end for it.
            return self._newest
        return self._newest


class LiveFile(AskedFile[LiveRequest]):
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.live_path, LiveRequest)


class SaveFile(AskedFile[SaveRequest]):
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.save_path, SaveRequest)


class SnapshotRequests(AskedFile[SnapshotRequest]):
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.snapshot_request_path, SnapshotRequest)
