"""The clock of one host of a run: how far it is ahead, as measurements tell and the stamps of its logs.

A log's correction is constant: by the first measurement that is known well. It changes only where the
host's clock was set, as one that a person put right before the run was gone on with: measurements say by how
much, and the log itself says where, as its wall clock jumps against its monotonic clock there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from llmtop.profiler.record.hostevents import ClockMeasured

CLOCK_SECONDS = 0.05
"""Clocks that differ by less matter to nobody who looks at steps: their stamps stay as they are."""
SET_SECONDS = 1.0
"""A clock that has moved by more than this, and more than is uncertain, was set: drift takes a day for it."""
_LATE_SECONDS = 300.0
"""A clock is measured at most so long after the first line of a start."""


class ClockOffset(Struct, frozen=True, array_like=True):
    """How far a host's clock is ahead, from one setting of it to the next."""

    measured_at: float
    """By the launching machine's clock."""
    ahead_seconds: float
    error_seconds: float

    @property
    def taken_off_seconds(self) -> float:
        """0 where it is too little to matter or to be sure of."""
        return self.ahead_seconds if abs(self.ahead_seconds) > max(CLOCK_SECONDS, self.error_seconds) else 0.0


HostClock = tuple[ClockOffset, ...]
"""One for each time that the clock was set, the oldest first; empty while nothing was measured."""


class Stamps(Struct, frozen=True, array_like=True):
    """How the stamps of a log are to be read at one place of it."""

    number: int = 0
    """Which of the clock's offsets is in force."""
    boot: float | None = None
    """Wall clock less monotonic clock of the line before, both as it has them."""


def noted(clock: HostClock, event: ClockMeasured) -> HostClock:
    """With one more measurement; the same object where that changes nothing."""
    made = ClockOffset(event.t, event.offset_seconds, event.error_seconds)
    if not clock:
        return (made,)
    last = clock[-1]
    sure = SET_SECONDS + made.error_seconds + last.error_seconds
    if made.measured_at <= last.measured_at:
        return clock
    if abs(made.ahead_seconds - last.ahead_seconds) > sure:
        return (*clock, made)
    if last.error_seconds > CLOCK_SECONDS and made.error_seconds < last.error_seconds / 2:
        return (*clock[:-1], ClockOffset(last.measured_at, made.ahead_seconds, made.error_seconds))
    return clock


class NotedClocks:
    """What was measured of each host's clock. A measurement counts once, however often it is passed: what it
    changes depends on those before it."""

    def __init__(self) -> None:
        self._clocks: dict[str, HostClock] = {}
        self._newest: dict[str, float] = {}
        """Time of the newest measurement of each host."""

    def note(self, event: ClockMeasured) -> bool:
        """Whether it changes what is known of its host; one that is not newer than all before does not."""
        if event.t <= self._newest.get(event.host, -math.inf):
            return False
        self._newest[event.host] = event.t
        before = self.of(event.host)
        self._clocks[event.host] = noted(before, event)
        return self._clocks[event.host] is not before

    def of(self, host: str) -> HostClock:
        return self._clocks.get(host, ())


def at_beginning(clock: HostClock, t: float) -> int:
    """Which offset is in force in a log's first line: a start's first lines come as clocks are measured."""
    return min(range(len(clock)), key=lambda at: abs(t - clock[at].ahead_seconds - clock[at].measured_at))


def after_jump(clock: HostClock, number: int, jump: float, t: float) -> int:
    """Which offset is in force from a line on before which the wall clock has jumped by `jump` seconds.

    Either the clock was set, by what one of the next measurements says too, or the machine was started anew:
    then the newest one counts that was measured by about then. Else nothing is known, and nothing changes.
    """
    expected = clock[number].ahead_seconds + jump
    later = range(number + 1, len(clock))
    for at in later:
        if abs(clock[at].ahead_seconds - expected) <= SET_SECONDS + clock[at].error_seconds:
            return at
    by_then = (at for at in later if t - clock[at].ahead_seconds >= clock[at].measured_at - _LATE_SECONDS)
    return max(by_then, default=number)
