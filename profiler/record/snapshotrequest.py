"""What the supervisor hands to the ranks when somebody asks for a snapshot: one file in the run's folder."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llmtop.profiler.record.askedfile import AskedFile
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotKind
from llmtop.profiler.record.wholefile import write_atomic


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
    """Before ranks are started: what earlier ones were asked is not meant for them."""
    run.snapshot_request_path.unlink(missing_ok=True)


class SnapshotRequests(AskedFile[SnapshotRequest]):
    def __init__(self, run: RunDir) -> None:
        super().__init__(run.snapshot_request_path, SnapshotRequest)
