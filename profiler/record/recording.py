"""A run's logs as one stream of events in the order of time, which can be entered at any place seen before.

A log is decoded part by part, so that a run of any length takes little memory. A `Place` says where in
each log the stream stands; a cursor that is made at a place gives the same events as the first one did.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice
from operator import attrgetter, itemgetter, le
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.record.clocks import Clocks
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.hostclock import HostClock, Stamps
from llmtop.profiler.record.segments import START, Position, log_bytes
from llmtop.profiler.record.stamping import take_off

PART_BYTES = 64 * 1024
"""Of a log, decoded at once: events of larger parts leave the processor's cache before they are folded."""
_TIME = attrgetter("t")


class LogPlace(Struct, frozen=True):
    """Where one log stands: behind some events of the parts that begin at a position."""

    at: Position = START
    taken: int = 0
    skipped_lines: int = 0
    """Before that part."""
    latest: float = 0.0
    """Largest time stamp before that part."""
    stamps: Stamps = Stamps()
    """Of a log whose stamps are corrected: how that goes on in that part."""

    @property
    def read_bytes(self) -> int:
        """Of the log, before that part."""
        return self.at.read_bytes


Place = tuple[LogPlace, ...]
"""Of every log, in the order of the paths."""

Passed = Callable[[int, Position, list[AnyEvent]], None]
"""Told of each part that was decoded: number of the log, where it begins, events."""


class NoSuchPlace(Exception):
    """A log does not hold what a place says that was taken from it, or was thinned there."""


class LogCursor:
    """One log from a place on. Times never go back: a clock that was set back does not reorder a log."""

    def __init__(
        self,
        path: Path,
        place: LogPlace,
        passed: Callable[[Position, list[AnyEvent]], None] | None = None,
        clock: HostClock = (),
    ) -> None:
        """`clock` is what events get the launching machine's time by, where another clock has stamped them.

        Raises NoSuchPlace where the log has become shorter than that.
        """
        self.path = path
        self._clock = clock
        self._tail = EventTail(path, place.at)
        self._tail.skipped_lines = place.skipped_lines
        self._passed = passed
        self._parts: list[tuple[LogPlace, int]] = []
        """What is decoded: where each part begins, and how many events it has."""
        self._end = replace(place, taken=0)
        self.events: list[AnyEvent] = []
        self.times: list[float] = []
        self.in_order = True
        """Whether `times` are those that the events have themselves."""
        self.taken = 0
        while len(self.events) < place.taken:
            if not self.extend():
                raise NoSuchPlace(f"{path} has no {place.taken} events behind {place.at}")
        self.taken = place.taken

    @property
    def left(self) -> int:
        return len(self.events) - self.taken

    @property
    def place(self) -> LogPlace:
        return replace(self._parts[0][0], taken=self.taken) if self.left else self._end

    @property
    def skipped_lines(self) -> int:
        return self._tail.skipped_lines

    @property
    def goes_on(self) -> bool:
        """Whether the log has more behind what is decoded."""
        return self._tail.behind

    def fill(self) -> bool:
        """Decode the next part where nothing is left; whether there is anything."""
        while not self.left:
            if not self.extend():
                return False
        return True

    def extend(self) -> bool:
        """Decode one more part; whether there was one. Until then the place stays behind the last one.

        Raises NoSuchPlace where the log was thinned meanwhile, and what would have been next was left out.
        """
        at = self._tail.position
        events = self._tail.poll(PART_BYTES)
        if self._tail.lost_place:
            raise NoSuchPlace(f"{self.path} was thinned behind {at}")
        if self._tail.position == at:
            return False
        self._drop_taken()
        stamps = take_off(events, self._clock, self._end.stamps) if self._clock else self._end.stamps
        times, latest = [event.t for event in events], self._end.latest
        if not all(map(le, chain((latest,), times), times)):
            self.in_order = False
            times = list(islice(accumulate(times, max, initial=latest), 1, None))
        self.events += events
        self.times += times
        self._parts.append((self._end, len(events)))
        latest = times[-1] if times else latest
        self._end = LogPlace(self._tail.position, 0, self._tail.skipped_lines, latest, stamps)
        if self._passed is not None:
            self._passed(at, events)
        return True

    def _drop_taken(self) -> None:
        """Parts of which everything was given."""
        while self._parts and self.taken >= (count := self._parts[0][1]):
            del self._parts[0], self.events[:count], self.times[:count]
            self.taken -= count
        self.in_order = self.in_order or not self._parts


class Cursor:
    """All logs of a run, merged by time."""

    def __init__(
        self,
        paths: tuple[Path, ...],
        place: Place | None = None,
        passed: Passed | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        """`paths` is what `RunDir.event_logs` gave once; a place is of the same logs and clocks.

        `clocks` is told of what the lead says of them.
        """
        places = place if place is not None else (LogPlace(),) * len(paths)
        self._clocks = clocks
        self._logs: list[LogCursor] = []
        self._dry: set[LogCursor] = set()
        """Those that had nothing more at the last look."""
        self.earliest = self.latest = 0.0
        """Times of the first and the last event of the newest `batch`."""
        for number, (path, where) in enumerate(zip(paths, places, strict=True)):

            def told(at: Position, events: list[AnyEvent], number: int = number) -> None:
                if passed is not None:
                    passed(number, at, events)

            self._logs.append(self._opened(path, where, told if passed is not None else None))

    def _opened(
        self, path: Path, place: LogPlace, passed: Callable[[Position, list[AnyEvent]], None] | None = None
    ) -> LogCursor:
        clocks = self._clocks
        if clocks is None:
            return LogCursor(path, place, passed)
        if path == clocks.lead_path and passed is None:
            return LogCursor(path, place, lambda _, events: clocks.note(events))
        return LogCursor(path, place, passed, clocks.of(path))

    @property
    def place(self) -> Place:
        return tuple(log.place for log in self._logs)

    @property
    def places(self) -> dict[Path, LogPlace]:
        return {log.path: log.place for log in self._logs}

    @property
    def skipped_lines(self) -> int:
        return sum(log.skipped_lines for log in self._logs)

    @property
    def offset_bytes(self) -> int:
        """How much of all logs has been given, to within a part of each."""
        return sum(log.place.read_bytes for log in self._logs)

    def look_again(self, paths: Sequence[Path]) -> None:
        """The logs that there are now: new ones are read from their beginning, known ones may have grown."""
        self._dry.clear()
        known = {log.path: log for log in self._logs}
        if known.keys() < set(paths):
            self._logs = [known.get(path) or self._opened(path, LogPlace()) for path in paths]

    @property
    def behind(self) -> bool:
        """Whether there may be more than was given since the last look."""
        return any(log.left or log not in self._dry for log in self._logs)

    def batch(self, until: float | None = None) -> list[AnyEvent]:
        """The next events, none later than `until`; empty: no more until somebody looks again."""
        logs = [log for log in self._logs if self._has_more(log)]
        spans = _spans(logs, until)
        if not spans:
            return []
        self.earliest = min(log.times[begin] for log, begin, _ in spans)
        self.latest = max(log.times[end - 1] for log, _, end in spans)
        for log, _, end in spans:
            log.taken = end
        events = [event for log, begin, end in spans for event in islice(log.events, begin, end)]
        if len(spans) == 1:
            return events
        if all(log.in_order for log, _, _ in spans):
            events.sort(key=_TIME)
            return events
        times = [t for log, begin, end in spans for t in islice(log.times, begin, end)]
        return [event for _, event in sorted(zip(times, events, strict=True), key=itemgetter(0))]

    def _has_more(self, log: LogCursor) -> bool:
        if log in self._dry:
            return False
        if not log.fill():
            self._dry.add(log)
            return False
        return True

    def take(self, most: int, until: float | None = None) -> list[tuple[float, AnyEvent]]:
        """The next events with their times, at most `most`, none later than `until`; empty: no more."""
        logs = [log for log in self._logs if log.fill()]
        if not logs:
            return []
        # Beyond the end of a part another log's next part may hold an earlier event.
        horizon = min(log.times[-1] for log in logs)
        horizon = horizon if until is None else min(horizon, until)
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


_Span = tuple[LogCursor, int, int]
"""A log, and the first and the end of its events."""


def _spans(logs: Sequence[LogCursor], until: float | None) -> list[_Span]:
    """What can be given of the logs: what no part that is not decoded yet can hold an earlier event than.

    Of one time the logs come in their own order, so all of that time has to be there.
    """
    while True:
        horizon = min((log.times[-1] for log in logs if log.goes_on), default=None)
        spans = [(log, log.taken, _end_of(log, horizon, until)) for log in logs]
        found = [(log, begin, end) for log, begin, end in spans if end > begin]
        if found or horizon is None or (until is not None and horizon > until):
            return found
        for log in logs:
            if log.goes_on and log.times[-1] == horizon:
                log.extend()


def _end_of(log: LogCursor, horizon: float | None, until: float | None) -> int:
    """Events before the horizon and not after `until`."""
    end = len(log.events) if horizon is None else bisect_left(log.times, horizon, log.taken)
    return end if until is None else bisect_right(log.times, until, log.taken, end)


def logs_size_bytes(paths: tuple[Path, ...]) -> int:
    """Of all of them together."""
    return sum(map(log_bytes, paths))
