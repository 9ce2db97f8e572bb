"""What the record says of the changes to a run, and how each event of a change adds to that."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)

ChangeStatus = Literal["under way", "applied", "refused", "failed"]


class ChangeRecord(Struct, frozen=True, kw_only=True):
    """One change, from the request to what became of it."""

    status: ChangeStatus
    asked: ChangeAsked | None = None
    """None for one that was refused at once."""
    refused: ChangeRefused | None = None
    restaged: Restaged | None = None
    began: RestageBegan | None = None
    step: int | None = None
    """The first on the new setting."""
    at: float = 0.0
    """Wall clock of its newest event."""
    reason: str = ""
    """Why it was refused or failed."""
    back_to: int | None = None
    """Of one that failed: the setting that is in force since then, which may be its own."""

    @property
    def setting(self) -> int | None:
        return self.asked.setting if self.asked is not None else None

    @property
    def down_seconds(self) -> float | None:
        """How long no step was made for it; None while that is not known."""
        if self.restaged is not None:
            return self.restaged.down_seconds
        hot = self.asked is not None and not self.asked.restage
        return 0.0 if hot and self.status == "applied" else None


class Span(Struct, frozen=True, kw_only=True):
    """Steps that were made on one setting."""

    setting: int = 0
    first_step: int = 1
    launch: int = 0
    """The processes that made its first point in the series, of `launch_step`. All later ones are on it."""
    launch_step: int = 1
    """Larger than `first_step` where the run went on from before it: that step was made on another setting,
    and then again on this one."""


class Changes(Struct, frozen=True, kw_only=True):
    records: tuple[ChangeRecord, ...] = ()
    """In the order in which they were asked."""
    spans: tuple[Span, ...] = (Span(),)
    """In the order of the steps; the last one is of the setting in force."""
    ranks: int | None = None
    """How many there are since the last relaunch; None before any."""
    launch: int = 0
    """How often all processes of the run were started anew."""

    @property
    def setting(self) -> int:
        """In force."""
        return self.spans[-1].setting

    @property
    def under_way(self) -> ChangeRecord | None:
        return next((record for record in self.records if record.status == "under way"), None)


def ask(changes: Changes, event: ChangeAsked) -> Changes:
    record = ChangeRecord(status="under way", asked=event, at=event.t)
    return replace(changes, records=(*changes.records, record))


def refuse(changes: Changes, event: ChangeRefused) -> Changes:
    if event.setting is None:
        record = ChangeRecord(status="refused", refused=event, at=event.t, reason=event.reason)
        return replace(changes, records=(*changes.records, record))
    return _update(changes, event.setting, status="refused", refused=event, at=event.t, reason=event.reason)


def apply(changes: Changes, event: ChangeApplied) -> Changes:
    """Once for each rank; the first one counts."""
    if event.problem or event.setting in _settings_begun(changes):
        return changes
    changed = _update(changes, event.setting, status="applied", step=event.step, at=event.t)
    return _in_force(changed, _span(event.setting, event.step, changed.launch))


def begin_restage(changes: Changes, event: RestageBegan) -> Changes:
    changed = _update(changes, event.setting, began=event, at=event.t)
    launch = changed.launch + 1
    span = _span(event.setting, event.last_step + 1, launch)
    return replace(_in_force(changed, span), ranks=event.world_size, launch=launch)


def finish_restage(changes: Changes, event: Restaged) -> Changes:
    return _update(changes, event.setting, status="applied", restaged=event, step=event.step, at=event.t)


def fail_restage(changes: Changes, event: RestageFailed) -> Changes:
    changed = _update(
        changes, event.setting, status="failed", at=event.t, reason=event.reason, back_to=event.back_to
    )
    changed = replace(changed, ranks=event.world_size)
    if changed.setting == event.back_to:
        return changed
    # Those that are there since a supervisor ended went back when they were started.
    now = changed.spans[-1]
    coming = replace(now, setting=event.back_to, launch=changed.launch, launch_step=now.first_step)
    return _in_force(changed, coming)


def go_on(changes: Changes, after_step: int | None) -> Changes:
    """In new processes, after that step; None: nobody has told yet which."""
    changes = replace(changes, launch=changes.launch + 1)
    return changes if after_step is None else go_back(changes, after_step)


def go_back(changes: Changes, after_step: int) -> Changes:
    """The steps after an earlier one are made anew, on the setting in force."""
    now = changes.spans[-1]
    kept = [span for span in changes.spans if span.first_step <= after_step]
    if now in kept:
        return changes
    first_step = after_step + 1
    if kept and kept[-1].setting == now.setting:
        first_step = kept.pop().first_step
    return replace(changes, spans=(*kept, replace(now, first_step=first_step)))


def describe(changes: Changes, setting: int) -> Changes:
    """A script's setting is what was seen of it, from its first step on."""
    return replace(changes, spans=(Span(setting=setting),))


def _settings_begun(changes: Changes) -> set[int]:
    return {span.setting for span in changes.spans}


def _span(setting: int, first_step: int, launch: int) -> Span:
    return Span(setting=setting, first_step=first_step, launch=launch, launch_step=first_step)


def _in_force(changes: Changes, coming: Span) -> Changes:
    # A setting that made no step leaves no span.
    kept = tuple(span for span in changes.spans if span.first_step < coming.first_step)
    if kept and kept[-1].setting == coming.setting:
        return replace(changes, spans=kept)
    return replace(changes, spans=(*kept, coming))


def _update(changes: Changes, setting: int, **news: object) -> Changes:
    records = tuple(
        replace(record, **news) if record.setting == setting else record for record in changes.records
    )
    return replace(changes, records=records)
