"""Events of a change to a live run: asked, refused, applied between two steps, or taken by a relaunch.

Every setting of a run has a number: 0 is the one that it was launched with, and each change that is tried
leads to the next one, whether it stays or not.
"""

from typing import Any

from msgspec import Struct, field

from llmtop.presets.ranks import WorldSize
from llmtop.profiler.record.eventbase import Event


class KeyChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key of the run."""

    key: str
    old: Any = None
    new: Any = None
    restage: bool = False
    """It takes a relaunch of the ranks; else it is changed between two steps."""
    adapted: bool = False
    """Nobody asked for it: it follows from the others, so that the global batch stays."""


class ChangeAsked(Event, frozen=True, kw_only=True, tag="change_asked"):
    """The supervisor takes up a change; its end is another event of the same setting."""

    setting: int
    request_id: str = ""
    restage: bool = False
    """Something in it takes a relaunch, so all of it does."""
    changes: tuple[KeyChange, ...] = ()
    fits: bool | None = None
    """As predicted, and the two below: before and after."""
    old_peak_bytes: int | None = None
    new_peak_bytes: int | None = None
    old_step_seconds: float | None = None
    new_step_seconds: float | None = None
    expected_down_seconds: float | None = None
    lost: tuple[str, ...] = ()
    """What the change costs beyond time, in words."""
    why: str = ""
    """Of one that nobody asked for: the out-of-memory that it heals, in words."""


class ChangeRefused(Event, frozen=True, kw_only=True, tag="change_refused"):
    """A change that is not made; nothing about the run is another."""

    request_id: str = ""
    asked: tuple[str, ...] = ()
    """As typed: `key=value`."""
    reason: str = ""
    fix: str = ""
    setting: int | None = None
    """Of one that was taken up and then refused by the ranks."""


class ChangeApplied(Event, frozen=True, kw_only=True, tag="change_applied"):
    """A rank trains on another setting from `step` on, without having stopped."""

    setting: int
    step: int
    seconds: float = 0.0
    """That the change itself took."""
    problem: str = ""
    """Why it was not made after all, on any rank; empty when it was."""


class RestageBegan(Event, frozen=True, kw_only=True, tag="restage_began"):
    """The ranks have saved and ended, and are started on another setting."""

    setting: int
    from_setting: int
    last_step: int
    """On the old setting."""
    world_size: WorldSize
    save_seconds: float | None = None
    saved_bytes: int | None = None
    folder: str = ""
    """Where the state lies in between."""


class Restaged(Event, frozen=True, kw_only=True, tag="restaged"):
    """Every rank has made a step on the new setting."""

    setting: int
    step: int
    """The first on it."""
    down_seconds: float | None = None
    """From the end of the last step on the old setting to the end of the first one on the new."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """What the time went into: `save`, `end` of the ranks, start-up by stage, and what is `in_between`."""
    notes: tuple[str, ...] = ()
    """What is not exactly as it was before."""


class RestageFailed(Event, frozen=True, kw_only=True, tag="restage_failed"):
    """The new setting did not come to its first step: the run goes on with an old one."""

    setting: int
    back_to: int
    reason: str
    world_size: WorldSize
