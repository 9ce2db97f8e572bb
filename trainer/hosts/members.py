"""The hosts of a run as the lead sees them: what each has told, which do not answer, orders to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent, RunEnded, RunStarted
from llmtop.profiler.record.hostabout import HostAbout, read_about
from llmtop.profiler.record.hostclock import ClockOffset
from llmtop.profiler.record.hostevents import ClockMeasured, HostFound, HostLost, OrderCarriedOut
from llmtop.profiler.record.hosts import Host, HostDir
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.hosts.link import Clock
from llmtop.trainer.hosts.orders import AnyOrder, OrderWriter
from llmtop.trainer.hosts.transport import Transport

LOST_SECONDS = 10.0
"""A host that was not heard of for so long does not answer."""
_DEAD_AFTER_SECONDS = 3.0
"""The last lines of a supervisor that ended may still be on their way."""
_CLOCK_SECONDS = 6 * 3600.0
_SMALLEST_CLOCK_CHANGE_SECONDS = 0.01
"""Nobody looks at less; a clock that nobody sets drifts by a second a day, and hosts may be thousands."""

STILL_LEAVING = "its ranks have ended, and its supervisor is still on its way out"


class Told(Struct, frozen=True):
    member: Member
    event: AnyEvent


class Member:
    """One host."""

    def __init__(self, run: RunDir, host: Host) -> None:
        self.host = host
        self.dir = HostDir(run.path, host)
        self.orders = OrderWriter(self.dir.orders_path)
        # What an earlier supervisor of this host has told is past.
        self.dir.own_path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._tail = EventTail(self.dir.events_path(SUPERVISOR))
        self._tail.poll()
        self.transport: Transport | None = None
        self.answers: dict[int, OrderCarriedOut] = {}
        self.lost_at: float | None = None
        """When it stopped answering; None while it answers."""
        self.gone = ""
        """Why it is counted on no more; empty while it is."""
        self.ended: RunEnded | None = None
        """What its supervisor wrote last."""
        self._begun = False
        """Whether its supervisor has begun to tell."""
        self._dead_since: float | None = None
        self._clock: tuple[float, Clock] | None = None

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def answers_now(self) -> bool:
        return self.lost_at is None and not self.gone

    @property
    def at_work(self) -> bool:
        """Whether its supervisor lives, as far as is known."""
        return self.ended is None and not self.gone

    @property
    def quiet_seconds(self) -> float:
        return self.transport.quiet_seconds if self.transport is not None else 0.0

    @property
    def problem(self) -> str:
        return self.transport.problem if self.transport is not None else ""

    @property
    def unable(self) -> str:
        """Why it takes no orders though it answers; empty where it does."""
        return self.transport.unable if self.transport is not None and self.answers_now else ""

    @property
    def ahead_seconds(self) -> float:
        """How far its clock is ahead of the one here; 0 where that is too little to matter, or not known."""
        clock = self.transport.clock if self.transport is not None else None
        return ClockOffset(0.0, clock.offset_seconds, clock.error_seconds).taken_off_seconds if clock else 0.0

    def about(self, pid: int | None = None) -> HostAbout | None:
        return read_about(self.dir, pid=pid)

    def poll(self) -> list[AnyEvent]:
        """What it has told since the last call."""
        self.orders.flush()
        events: list[AnyEvent] = []
        for event in self._tail.poll():
            # What comes before is of an earlier supervisor, which may have left only now.
            self._begun = self._begun or isinstance(event, RunStarted)
            if self._begun:
                events.append(event)
            if self._begun and isinstance(event, OrderCarriedOut):
                self.answers[event.number] = event
            elif self._begun and isinstance(event, RunEnded):
                self.ended = event
        return events

    def presence(self, patience_seconds: float) -> HostLost | HostFound | None:
        """What has changed in whether it answers; `gone` is set where it is given up."""
        if self.transport is None or not self.at_work:
            return None
        now, quiet = time.monotonic(), self.transport.quiet_seconds
        self._see_death(now)
        if quiet > patience_seconds:
            self.gone = f"has not answered for {quiet:.0f} s{_because(self.transport.problem)}"
        if self.lost_at is None and quiet > LOST_SECONDS:
            self.lost_at = now - quiet
            return HostLost(host=self.name, quiet_seconds=quiet, reason=self.transport.problem)
        if self.lost_at is not None and quiet <= LOST_SECONDS:
            away, self.lost_at = now - self.lost_at, None
            return HostFound(host=self.name, away_seconds=away)
        return None

    def _see_death(self, now: float) -> None:
        assert self.transport is not None
        why = self.transport.dead
        if not why:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
            self.transport.ask_for_all()
        elif now - self._dead_since > _DEAD_AFTER_SECONDS and self.transport.has_all:
            self.gone = why

    def clock_news(self) -> ClockMeasured | None:
        """How its clock differs, where that was not told yet or has changed."""
        clock = self.transport.clock if self.transport is not None else None
        if clock is None:
            return None
        now = time.monotonic()
        if self._clock is not None:
            told_at, told = self._clock
            moved = abs(clock.offset_seconds - told.offset_seconds)
            sure = max(clock.error_seconds, told.error_seconds, _SMALLEST_CLOCK_CHANGE_SECONDS)
            if moved <= sure and now - told_at < _CLOCK_SECONDS:
                return None
        self._clock = (now, clock)
        return ClockMeasured(
            host=self.name, offset_seconds=clock.offset_seconds, error_seconds=clock.error_seconds
        )


class Members:
    def __init__(
        self, members: Iterable[Member], write: Callable[[AnyEvent], object], patience_seconds: float
    ) -> None:
        """A host that was not heard of for `patience_seconds` is given up."""
        self.all = tuple(members)
        self._write = write
        self._patience_seconds = patience_seconds

    def order(self, order: AnyOrder, members: Iterable[Member] | None = None) -> dict[Member, int]:
        """Tell all hosts, or some; the order's number for each that is at work."""
        chosen = self.all if members is None else members
        return {member: member.orders.write(order) for member in chosen if member.at_work}

    def poll(self) -> list[Told]:
        """What the hosts have told; who is lost or found again, and clocks, go into the record."""
        told = [Told(member, event) for member in self.all for event in member.poll()]
        for member in self.all:
            for news in (member.presence(self._patience_seconds), member.clock_news()):
                if news is not None:
                    self._write(news)
        return told

    @property
    def lost(self) -> tuple[Member, ...]:
        """Those that do not answer now, or never will."""
        return tuple(member for member in self.all if not member.answers_now)

    def close(self) -> None:
        for member in self.all:
            if member.transport is not None:
                member.transport.close()
            member.orders.close()


def _because(problem: str) -> str:
    return f" ({problem})" if problem else ""
