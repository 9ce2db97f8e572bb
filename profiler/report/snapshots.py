"""The part of a report about snapshots that were taken while the run went on."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.profiler.snapshots.reading import Table, lines_of, read_table

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
    first_shown = len(state.snapshots) - _NEWEST
    return tuple(_report(run, taken, shown=at >= first_shown) for at, taken in enumerate(state.snapshots))


def _report(run: RunDir, taken: SnapshotTaken, *, shown: bool) -> SnapshotReport:
    table = read_table(run, taken) if shown and not taken.problem else None
    lines = tuple(lines_of(run, taken, table)) if shown else ()
    return SnapshotReport(rank=rank_of(taken.src), taken=taken, table=table, lines=lines)
