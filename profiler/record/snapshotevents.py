"""Events of a snapshot or a trace that somebody asked of a live run."""

from typing import Literal

from msgspec import Struct

from llmtop.profiler.record.eventbase import Event

SnapshotKind = Literal["state", "trace", "modules"]
"""The allocator's blocks; what ran, with times; memory and time by module."""


class SnapshotParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody asks for."""

    what: SnapshotKind
    ranks: tuple[int, ...] = (0,)
    """Those that write."""
    step: int = 0
    """The first to be looked at; 0: the next one."""
    steps: int = 1
    with_stacks: bool = False
    """Of `state`: with the lines of Python that allocated, and all that happened in the step."""


class SnapshotFile(Struct, frozen=True, kw_only=True):
    """A file below the run's folder."""

    name: str
    """Relative to that folder."""
    size_bytes: int


class SnapshotAsked(Event, frozen=True, kw_only=True, tag="snapshot_asked"):
    """The supervisor has handed a snapshot to the ranks; each of `ranks` answers with a `SnapshotTaken`."""

    number: int
    """Counted from 1 for each start of the supervisor."""
    request_id: str
    what: SnapshotKind
    ranks: tuple[int, ...]
    step: int = 0
    """The first to be looked at, as asked for; 0: the next one."""
    steps: int = 1
    with_stacks: bool = False
    expected_bytes: int | None = None
    """Of the files of all ranks, by estimate."""


class SnapshotTaken(Event, frozen=True, kw_only=True, tag="snapshot_taken"):
    """A rank has written what was asked of it, or says why not."""

    number: int
    what: SnapshotKind
    step: int
    """The first that was looked at."""
    steps: int = 1
    files: tuple[SnapshotFile, ...] = ()
    stall_seconds: float = 0.0
    """That this rank did nothing but this: beginning, ending and writing, beyond slower steps."""
    seconds: float = 0.0
    """From the end of the last step to the last file: the training goes on meanwhile."""
    notes: tuple[str, ...] = ()
    problem: str = ""
    """Why there is nothing; empty when there is."""
