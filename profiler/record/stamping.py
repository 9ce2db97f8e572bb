"""Gives the events of a host's log the launching machine's time."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import force_setattr

from llmtop.profiler.record.events import AnyEvent, StepFinished
from llmtop.profiler.record.hostclock import SET_SECONDS, HostClock, Stamps, after_jump, at_beginning


def take_off(events: Sequence[AnyEvent], clock: HostClock, stamps: Stamps) -> Stamps:
    """Give events, the next of a log, the launching machine's time in place; how the log goes on behind them.

    They must be the caller's own, as a log's tail gives them.
    """
    if len(clock) == 1:
        seconds = clock[0].taken_off_seconds
        for event in events:
            set_back(event, seconds)
        return stamps
    number, boot = stamps.number, stamps.boot
    for event in events:
        now = event.t - event.m
        if boot is None:
            number = at_beginning(clock, event.t)
        elif abs(now - boot) > SET_SECONDS:
            number = after_jump(clock, number, now - boot, event.t)
        boot = now
        set_back(event, clock[number].taken_off_seconds)
    return Stamps(number, boot)


def set_back(event: AnyEvent, seconds: float) -> None:
    """An event's times by a clock that is so many seconds behind the one that has stamped it, in place."""
    force_setattr(event, "t", event.t - seconds)
    if isinstance(event, StepFinished) and event.ended is not None:
        force_setattr(event, "ended", event.ended - seconds)
