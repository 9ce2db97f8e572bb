"""What a rank wrote for a snapshot, read back from the run's folder; pickles are never read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from llmtop.presets.foreign import read_json
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.profiler.snapshots.blocks import BlockSummary
from llmtop.profiler.snapshots.modules import ModuleTable
from llmtop.profiler.snapshots.text import block_lines, module_lines, trace_lines
from llmtop.profiler.snapshots.tracesummary import TraceSummary
from llmtop.profiler.units import format_bytes, format_seconds

_MOST_BYTES = 64 * 1024**2
"""No table of ours is larger."""
_T = TypeVar("_T")

Table = TraceSummary | ModuleTable | BlockSummary


def taken_for(state: RunState, request_id: str) -> tuple[SnapshotTaken, ...]:
    """What the ranks wrote for a request, in the order of the ranks."""
    asked = next((event for event in state.snapshots_asked if event.request_id == request_id), None)
    if asked is None:
        return ()
    found = [event for event in state.snapshots if event.number == asked.number and event.t >= asked.t]
    return tuple(sorted(found, key=lambda event: rank_of(event.src) or 0))


def read_table(run: RunDir, taken: SnapshotTaken) -> Table | None:
    """None where there is none, or it is damaged: the files are listed in any case."""
    if taken.what == "trace":
        return _read(run, taken, ".summary.json", TraceSummary)
    if taken.what == "modules":
        return _read(run, taken, ".json", ModuleTable)
    return _read(run, taken, ".summary.json", BlockSummary)


def snapshot_lines(run: RunDir, taken: SnapshotTaken) -> Iterator[str]:
    """The table of one rank's snapshot, what it cost, and where its files are."""
    return lines_of(run, taken, None if taken.problem else read_table(run, taken))


def lines_of(run: RunDir, taken: SnapshotTaken, table: Table | None) -> Iterator[str]:
    """The same of a table that has been read."""
    rank = rank_of(taken.src)
    if taken.problem:
        yield f"Rank {rank} took no snapshot ({taken.what}): {taken.problem}"
        return
    match table:
        case TraceSummary() as summary:
            yield from trace_lines(summary)
        case ModuleTable() as modules:
            yield from module_lines(modules)
        case BlockSummary() as blocks:
            yield from block_lines(blocks)
        case None:
            yield f"Snapshot of rank {rank} ({taken.what}): its table cannot be read"
    for note in taken.notes:
        yield f"  note: {note}"
    yield (
        f"  the rank stood still for {format_seconds(taken.stall_seconds)};"
        f" all was written after {format_seconds(taken.seconds)}"
    )
    for file in taken.files:
        yield f"  {format_bytes(file.size_bytes):>10}  {run.path / file.name}"


def _read(run: RunDir, taken: SnapshotTaken, ending: str, kind: type[_T]) -> _T | None:
    for file in taken.files:
        path = run.path / file.name
        # The name is what a log says, which may have come from an archive.
        if not file.name.endswith(ending) or path.parent != run.snapshots_dir:
            continue
        try:
            return read_json(path, kind, _MOST_BYTES)
        except (OSError, msgspec.MsgspecError):
            return None
    return None
