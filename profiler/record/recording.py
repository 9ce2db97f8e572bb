"""A run's logs as one stream of events in the order of time, which can be entered at any place seen before.

A log is decoded part by part, so that a run of any length takes little memory. A `Place` says where in
each log the stream stands; a cursor that is made at a place gives the same events as the first one did.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from msgspec import Struct

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir

PART_BYTES = 128 * 1024
"""Of a log, decoded at once."""


class LogPlace(Struct, frozen=True):
    """Where one log stands: behind some events of the part that begins at an offset."""

    offset: int = 0
    taken: int = 0
    skipped_lines: int = 0
    """Before that part."""
    latest: float = 0.0
    """Largest time stamp before that part."""


Place = tuple[LogPlace, ...]
"""Of every log, in the order of `logs_of`."""

Passed = Callable[[int, int, list[AnyEvent]], None]
"""Told of each part that was decoded: number of the log, offset, events."""


class LogCursor:
    """One log from a place on. Times never go back: a clock that was set back does not reorder a log."""

    def __init__(
        self, tail: EventTail, place: LogPlace, passed: Callable[[int, list[AnyEvent]], None]
    ) -> None:
        self._tail = tail
        self._passed = passed
        self._offset, self._latest, self._skipped = place.offset, place.latest, place.skipped_lines
        self._next_latest = place.latest
        tail.skipped_lines = place.skipped_lines
        self.events: list[AnyEvent] = []
        self.times: list[float] = []
        self.taken = 0
        self._read()
        self.taken = place.taken

    @property
    def left(self) -> int:
        return len(self.events) - self.taken

    @property
    def place(self) -> LogPlace:
        return LogPlace(self._offset, self.taken, self._skipped, self._latest)

    @property
    def skipped_lines(self) -> int:
        return self._tail.skipped_lines

    def fill(self) -> bool:
        """Decode the next part where nothing is left; whether there is anything."""
        while not self.left:
            before = self._tail.offset
            self._read()
            if self._tail.offset == before:
                return False
        return True

    def _read(self) -> None:
        """The next part; where there is none yet, the place stays behind the last one."""
        offset, skipped = self._tail.offset, self._tail.skipped_lines
        events = self._tail.poll(PART_BYTES)
        if self._tail.offset == offset:
            return
        self._offset, self._skipped, self._latest = offset, skipped, self._next_latest
        self.events, self.taken, self.times = events, 0, []
        latest = self._latest
        for event in events:
            latest = max(latest, event.t)
            self.times.append(latest)
        self._next_latest = latest
        self._passed(offset, events)


class Cursor:
    """All logs of a run, merged by time."""

    def __init__(
        self, paths: tuple[Path, ...], place: Place | None = None, passed: Passed | None = None
    ) -> None:
        """`paths` is what `logs_of` gave once; a place is of the same logs."""
        places = place if place is not None else (LogPlace(),) * len(paths)
        self._logs: list[LogCursor] = []
        for number, (path, where) in enumerate(zip(paths, places, strict=True)):

            def told(offset: int, events: list[AnyEvent], number: int = number) -> None:
                if passed is not None:
                    passed(number, offset, events)

            self._logs.append(LogCursor(EventTail(path, where.offset), where, told))

    @property
    def place(self) -> Place:
        return tuple(log.place for log in self._logs)

    @property
    def skipped_lines(self) -> int:
        return sum(log.skipped_lines for log in self._logs)

    @property
    def offset_bytes(self) -> int:
        """How much of all logs has been given, to within a part of each."""
        return sum(log.place.offset for log in self._logs)

    def take(self, most: int, until: float | None = None) -> list[tuple[float, AnyEvent]]:
        """The next events with their times, at most `most`, none later than `until`; empty: no more."""
        logs = [log for log in self._logs if log.fill()]
        if not logs:
            return []
        # Beyond the end of a part another log's next part may hold an earlier event.
        horizon = min(log.times[-1] for log in logs)
        if until is not None:
            horizon = min(horizon, until)
        found: list[tuple[float, int, AnyEvent]] = []
        for number, log in enumerate(logs):
            end = bisect_right(log.times, horizon, log.taken)
            found += [
                (t, number, event)
                for t, event in zip(log.times[log.taken : end], log.events[log.taken : end], strict=True)
            ]
        found.sort(key=itemgetter(0))
        del found[most:]
        for _, number, _ in found:
            logs[number].taken += 1
        return [(t, event) for t, _, event in found]


def logs_of(run: RunDir) -> tuple[Path, ...]:
    """All event logs of a run as it is now; that of the sampler is the last but one."""
    return (*run.rank_events().values(), run.events_path(HARDWARE), run.events_path(SUPERVISOR))


def logs_size_bytes(paths: tuple[Path, ...]) -> int:
    """Of all of them together."""
    return sum(path.stat().st_size for path in paths if path.exists())
