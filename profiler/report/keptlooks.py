"""What a second reading of a long record has found, kept beside it: the next report need not read it again.

A cache, as the bookmark is: it counts only for the same logs, looked at at the same times by the same code.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.findings.finding import Finding
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.bookmark import code_digest
from llmtop.profiler.record.feed import WORTH_KEEPING_BYTES
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import segments_of
from llmtop.profiler.record.wholefile import write_atomic

_CODE = (".", "../presets")
"""What makes findings of a record. Of presets' figures none is read again: a run keeps its own."""


class Look(NamedTuple):
    """At what stood out when a step was finished."""

    at: float
    """Wall clock."""
    setting: int
    first: int
    """Step from which on it tells."""
    last: int
    ends: bool
    """Of the last step of a setting: it tells of all of it."""


class LookedAt(NamedTuple):
    look: Look
    found: tuple[Finding, ...]


class _Kept(Struct, frozen=True, kw_only=True):
    code: str
    """Of the modules that made it."""
    logs: str
    """What the files of the logs were then."""
    looks: tuple[Look, ...]
    """All that were to be made; of a damaged record fewer are."""
    seen: tuple[LookedAt, ...]


def read_looks(run: RunDir, looks: tuple[Look, ...]) -> tuple[LookedAt, ...] | None:
    """What was found at these looks; None where nobody has kept that of this record."""
    try:
        kept = read_json(run.looks_path, _Kept, own=True)
        same = (kept.code, kept.logs, kept.looks) == (code_digest(*_CODE), _logs(run), looks)
    except (OSError, msgspec.MsgspecError):
        return None
    return kept.seen if same else None


def keep_looks(
    run: RunDir, state: RunState, looks: tuple[Look, ...], seen: tuple[LookedAt, ...], size_bytes: int
) -> None:
    """`size_bytes` is that of the record. Nothing is kept of a run that goes on, of a short record, of one of
    another user's or where nothing can be written: the next report reads it again."""
    code = code_digest(*_CODE)
    if code is None or state.status not in ENDED or size_bytes < WORTH_KEEPING_BYTES:
        return
    try:
        if run.path.stat().st_uid == os.getuid():
            kept = _Kept(code=code, logs=_logs(run), looks=looks, seen=seen)
            write_atomic(run.looks_path, msgspec.json.encode(kept), lasting=False)
    except OSError:
        return


def _logs(run: RunDir) -> str:
    """Names, sizes and times of all files of the logs; raises OSError where one is gone meanwhile."""
    checksum = 0
    for log in run.event_logs():
        for path in segments_of(log).paths(log):
            checksum = zlib.crc32(_file(run.path, path).encode(), checksum)
    return f"{checksum:08x}"


def _file(folder: Path, path: Path) -> str:
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"no {path.relative_to(folder)}\n"
    return f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n"
