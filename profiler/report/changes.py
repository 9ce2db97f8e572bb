"""The part of a report about what was changed while the run went on."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.changewords import details, outcome, title
from llmtop.profiler.fold.changestate import ChangeStatus
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.spans import measured_spans


class ChangeReport(Struct, frozen=True, kw_only=True):
    what: str
    status: ChangeStatus
    outcome: str
    """In words."""
    setting: int | None
    """Number of the setting that it led to, or was to."""
    restage: bool
    step: int | None
    """The first on that setting."""
    down_seconds: float | None
    details: tuple[str, ...]
    """Predicted and measured, in words."""


def changes_of(state: RunState) -> tuple[ChangeReport, ...]:
    spans = measured_spans(state)
    return tuple(
        ChangeReport(
            what=title(record),
            status=record.status,
            outcome=outcome(record),
            setting=record.setting,
            restage=record.asked is not None and record.asked.restage,
            step=record.step,
            down_seconds=record.down_seconds,
            details=tuple(details(record, spans)),
        )
        for record in state.changes.records
    )
