"""Folds snapshots and traces that were asked of a live run."""

from __future__ import annotations

from llmtop.profiler.fold.handlers.handler import Handler
from llmtop.profiler.record.snapshotevents import SnapshotAsked, SnapshotTaken

HANDLERS: dict[type, Handler] = {
    SnapshotAsked: lambda batch, event: batch.set(snapshots_asked=(*batch.state.snapshots_asked, event)),
    SnapshotTaken: lambda batch, event: batch.set(snapshots=(*batch.state.snapshots, event)),
}
