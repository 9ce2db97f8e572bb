"""The part of a report about snapshots that were taken while the run went on."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.profiler.snapshots.reading import Table, read_table, snapshot_lines

_NEWEST = 8
"""So many are shown whole: a run may have been looked at a hundred times."""


class SnapshotReport(Struct, frozen=True, kw_only=True):
    rank: int | None
    taken: SnapshotTaken
    table: Table | None
    """None where there is none, it cannot be read, or newer ones are shown."""
    lines: tuple[str, ...]
    """The same as text."""


def snapshots_of(run: RunDir, state: RunState) -> tuple[SnapshotReport, ...]:
    """All, the oldest first; the newest with their tables."""
    shown = state.snapshots[-_NEWEST:]
    return tuple(
        SnapshotReport(
            rank=rank_of(taken.src),
            taken=taken,
            table=read_table(run, taken) if taken in shown and not taken.problem else None,
            lines=tuple(snapshot_lines(run, taken)) if taken in shown else (),
        )
        for taken in state.snapshots
    )
