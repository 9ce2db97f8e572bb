"""A change to a live run while it is being made, and how far it is."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.changeevents import ChangeAsked, KeyChange
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.units import counted, format_seconds
from llmtop.trainer import control


class Phase(Enum):
    HOT = "the ranks change between two steps"
    READYING = "the ranks of the new setting are made ready"
    LEAVING = "the ranks save and end"
    TRIAL = "the new setting has not made a step yet"
    BACK = "the old setting has not made a step again yet"
    RESUMED = "the run goes on with another setting than it ended with, which has not made a step yet"


class UnderWay(Struct, kw_only=True):
    """The one change that is being made."""

    request: control.Request | None
    """None where nobody waits for an answer."""
    setting: int
    from_setting: int
    phase: Phase
    began: float = 0.0
    """Monotonic."""
    state_bytes: int = 0
    last_step_at: float | None = None
    saved: CheckpointSaved | None = None
    relaunched_at: float = 0.0
    failure: str = ""
    waits: bool = False
    """Made, but there was no room to write that."""


def never_ready(ready: int, wanted: int, seconds: float) -> str:
    """Why a change is given up whose ranks did not get ready beside those that train."""
    return (
        f"after {format_seconds(seconds)} {ready} of {counted(wanted, 'rank')} of the new setting had loaded"
        " what they need: one of them hangs, or this machine is very busy; they were ended, and the run was"
        " not touched"
    )


def change_asked(
    setting: int, changes: tuple[KeyChange, ...], old: Prediction, new: Prediction, *, restage: bool
) -> ChangeAsked:
    """The event of a change that is taken up, with what is predicted before and after."""
    return ChangeAsked(
        setting=setting,
        restage=restage,
        changes=changes,
        fits=new.fits,
        old_peak_bytes=old.peak_allocated_bytes,
        new_peak_bytes=new.peak_allocated_bytes,
        old_step_seconds=old.step_seconds,
        new_step_seconds=new.step_seconds,
    )
