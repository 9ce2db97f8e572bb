"""`imported.json`: where a run that came from an archive was recorded, and how far it was then."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_moment

_WENT_ON = frozenset({"starting", "running", "stopping", "exported"})
"""Statuses of a run that was going on; `exported` of one that was imported and handed on."""


class Imported(Struct, frozen=True, kw_only=True):
    archive: str
    run_id: str
    """Where it was recorded."""
    host: str
    status: str
    """When it was exported."""
    exported_at: float
    imported_at: float

    @property
    def went_on(self) -> bool:
        """Whether the run was going on when it was exported, so that its record ends before it did."""
        return self.status in _WENT_ON


def unended_status(run: RunDir) -> Literal["lost", "exported"]:
    """What a run is that nobody supervises and whose record has no end."""
    told = read_imported(run)
    return "exported" if told is not None and told.went_on else "lost"


def read_imported(run: RunDir) -> Imported | None:
    """None for a run that was made here, and where the file cannot be read."""
    try:
        return read_json(run.imported_path, Imported)
    except (OSError, msgspec.MsgspecError):
        return None


def imported_words(run: RunDir) -> str:
    """Which archive it came from, and where and when that was made; empty for a run that was made here."""
    told = read_imported(run)
    if told is None:
        return "from an archive" if run.is_imported else ""
    made = f"exported {format_moment(told.exported_at)}" + (" while it went on" if told.went_on else "")
    host = f", recorded on {told.host}" if told.host else ""
    name = f" as {told.run_id}" if told.run_id != run.run_id else ""
    return f"{format_moment(told.imported_at)} from {PurePath(told.archive).name}{host}{name}, {made}"
