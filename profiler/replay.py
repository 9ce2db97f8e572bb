"""A recorded run as it was at any time: the same fold as everywhere, entered at snapshots.

Events are folded from the beginning once, a little at a time (`read_on`). On the way snapshots of the state
are kept, few enough to stay small however long the run is, with when each step ended and when each finding
came up. Going to a time is then: the newest snapshot before it, and the events from there.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import HISTORY_SAMPLES, RunState
from llmtop.profiler.record.clocks import clocks_of
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import (
    AnyEvent,
    HangSuspected,
    HardwareSampled,
    RankFailed,
    RunEnded,
    StepFinished,
    XidSeen,
)
from llmtop.profiler.record.feed import state_before
from llmtop.profiler.record.recording import PART_BYTES, Cursor, NoSuchPlace, Place, logs_size_bytes
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import Position

MOST_SNAPSHOTS = 128
"""When there are more, every other one goes: a seek folds at most 1/64 of the run."""
_SLICES = 400
"""Looks at the findings over a whole run."""
_EVENT_BYTES = 700
"""Of a line of a log, roughly."""
_AGAIN_SHARE = 0.02
"""Of the run's time: a finding that goes and comes more often than this is marked once."""

_TELLING = (HangSuspected, RankFailed, XidSeen, RunEnded)
"""Events that make findings which may be gone a moment later."""

FindKeys = Callable[[RunState], dict[str, str]]
"""The findings of a state: key to title."""


class Mark(Struct, frozen=True):
    """A finding came up."""

    t: float
    key: str
    title: str


class _Snapshot(Struct, frozen=True):
    t: float
    """Of the last event folded."""
    events: int
    state: RunState
    """Without the history of the hardware, by far the largest part; it is read again from the log."""
    place: Place


class _Look(Struct, frozen=True):
    """Between two looks at the findings a mark is exact only to the slice, until somebody goes there."""

    begin: float
    mark: Mark


class Replay:
    """One recorded run, and where it stands: `state` is the fold of all events up to `at`."""

    def __init__(self, run: RunDir, find: FindKeys) -> None:
        self.run = run
        self._find = find
        self._begin()

    def _begin(self) -> None:
        """From the beginning: at first, and where the record was thinned under this reader."""
        run = self.run
        self._paths = run.event_logs()
        self._size = logs_size_bytes(self._paths)
        self._hardware = len(self._paths) - 2
        self._slice = max(1, self._size // _EVENT_BYTES // _SLICES)
        self._parts: list[tuple[Position, int]] = []
        """Of the sampler's log: where each part decoded begins, and samples in it."""
        self._clocks = clocks_of(run)
        self._front = Cursor(self._paths, passed=self._note_part, clocks=self._clocks)
        self._front_state = state_before(run, self._clocks)
        self._front_events = 0
        self._gap = self._slice
        """Events between snapshots."""
        self._snapshots = [_Snapshot(0.0, 0, self._front_state, self._front.place)]
        self._steps, self._step_times = array("q"), array("d")
        self._active: dict[str, str] = {}
        self._looks: list[_Look] = []
        self._exact: dict[int, Mark] = {}
        self.begin: float | None = None
        self.front: float = 0.0
        """Up to when the run has been read."""
        self.complete = False
        self._cursor = Cursor(self._paths, clocks=self._clocks)
        self.state = self._front_state
        self.at: float = 0.0

    # --- reading once from the beginning -----------------------------------------------------------

    def read_on(self, seconds: float) -> None:
        """Read about that long; `complete` once there is no more."""
        deadline = time.monotonic() + seconds
        while not self.complete:
            try:
                self._read_slice()
            except NoSuchPlace:
                self._begin()
            if time.monotonic() >= deadline:
                return

    def _read_slice(self) -> None:
        taken = self._take(self._front, self._slice, None)
        if not taken:
            self.complete = True
            return
        if self.begin is None:
            self.begin = self.front = self.at = taken[0][0]
        self._note_steps(taken)
        for piece in _pieces(taken):
            before, self.front = self.front, piece[-1][0]
            self._front_state = fold(self._front_state, (event for _, event in piece))
            self._look(before)
        self._front_events += len(taken)
        if self._front_events - self._snapshots[-1].events >= self._gap:
            self._keep()

    @staticmethod
    def _take(cursor: Cursor, most: int, until: float | None) -> list[tuple[float, AnyEvent]]:
        """As many as that where there are as many."""
        found: list[tuple[float, AnyEvent]] = []
        while len(found) < most:
            more = cursor.take(most - len(found), until)
            if not more:
                break
            found += more
        return found

    def _note_part(self, number: int, at: Position, events: list[AnyEvent]) -> None:
        if number == self._hardware:
            self._parts.append((at, sum(isinstance(event, HardwareSampled) for event in events)))

    def _note_steps(self, taken: list[tuple[float, AnyEvent]]) -> None:
        for t, event in taken:
            if isinstance(event, StepFinished) and rank_of(event.src) == 0:
                self._steps.append(event.step)
                self._step_times.append(t)

    def _look(self, before: float) -> None:
        found = self._find(self._front_state)
        length = self.front - (self.begin or 0.0)
        for key in found.keys() - self._active.keys():
            last = next((look.mark.t for look in reversed(self._looks) if look.mark.key == key), None)
            if last is None or self.front - last > _AGAIN_SHARE * length:
                self._looks.append(_Look(before, Mark(self.front, key, found[key])))
        self._active = found

    def _keep(self) -> None:
        bare = replace(self._front_state, hardware_history=())
        self._snapshots.append(_Snapshot(self.front, self._front_events, bare, self._front.place))
        if len(self._snapshots) > MOST_SNAPSHOTS:
            self._snapshots = self._snapshots[::2]
            self._gap *= 2

    @property
    def read_share(self) -> float:
        """How much has been read, 0 to 1."""
        return 1.0 if self.complete or not self._size else min(1.0, self._front.offset_bytes / self._size)

    # --- going to a time ---------------------------------------------------------------------------

    def can_reach(self, t: float) -> bool:
        """Whether the run has been read as far as that."""
        return self.complete or t < self.front

    def seek(self, t: float) -> None:
        """The state as of `t`: of everything not later than that. Only as far as was read.

        Where the record was thinned meanwhile, it is read anew instead.
        """
        try:
            self._seek(t)
        except NoSuchPlace:
            self._begin()

    def _seek(self, t: float) -> None:
        t = max(t, self.begin or 0.0)
        at = bisect_right(self._snapshots, t, key=lambda snapshot: snapshot.t) - 1
        snapshot = self._snapshots[at]
        # From where it stands, when that is nearer.
        if not (self.begin is not None and snapshot.t <= self.at <= t and self.state.now is not None):
            self._cursor = Cursor(self._paths, snapshot.place, clocks=self._clocks)
            self.state = self._with_history(snapshot)
        self._play_to(t, None)

    def play_to(self, t: float, most: int | None) -> bool:
        """On to `t`, or `most` events on; whether `t` was reached. As `seek` where the record was thinned."""
        try:
            return self._play_to(t, most)
        except NoSuchPlace:
            self._begin()
            return False

    def _play_to(self, t: float, most: int | None) -> bool:
        left = most
        while left is None or left > 0:
            taken = self._cursor.take(4096 if left is None else min(left, 4096), t)
            if not taken:
                self.at = t
                return True
            self.state = fold(self.state, (event for _, event in taken))
            self.at = taken[-1][0]
            left = None if left is None else left - len(taken)
        return False

    def _with_history(self, snapshot: _Snapshot) -> RunState:
        """A kept state with the samples before it, as the fold would have them."""
        place = snapshot.place[self._hardware]
        parts = [part for part in self._parts if part[0].read_bytes <= place.read_bytes]
        held, first = 0, place.at
        for at, samples in reversed(parts):
            first = at
            held += samples if at.read_bytes < place.read_bytes else 0
            if held >= HISTORY_SAMPLES:
                break
        tail, samples_before = EventTail(self._paths[self._hardware], first), []
        while (before := tail.offset) < place.read_bytes:
            samples_before += tail.poll(PART_BYTES)
            if tail.lost_place or tail.offset == before:
                raise NoSuchPlace(f"{self._paths[self._hardware]} was cut or thinned")
        samples_before += tail.poll(PART_BYTES)[: place.taken]
        history = tuple(event for event in samples_before if isinstance(event, HardwareSampled))
        return replace(snapshot.state, hardware_history=history[-HISTORY_SAMPLES:])

    # --- what there is to go to --------------------------------------------------------------------

    @property
    def end(self) -> float:
        """The newest event read so far."""
        return self.front

    def step_time(self, step: int) -> float | None:
        """When rank 0 finished that step, or the first after it; None: not read yet, or there is none."""
        return next(
            (t for number, t in zip(self._steps, self._step_times, strict=True) if number >= step), None
        )

    def step_after(self, t: float) -> float | None:
        at = bisect_right(self._step_times, t)
        return self._step_times[at] if at < len(self._step_times) else None

    def step_before(self, t: float) -> float | None:
        at = bisect_left(self._step_times, t) - 1
        return self._step_times[at] if at >= 0 else None

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Findings in the order in which they came up, as exact as they are known."""
        return tuple(self._exact.get(number, look.mark) for number, look in enumerate(self._looks))

    def mark_after(self, t: float) -> Mark | None:
        numbers = [number for number, look in enumerate(self._looks) if look.mark.t > t]
        exact = [mark for mark in map(self._exact_mark, numbers[:8]) if mark.t > t]
        return min(exact, key=lambda mark: mark.t, default=None)

    def mark_before(self, t: float) -> Mark | None:
        numbers = [number for number, look in enumerate(self._looks) if look.begin < t]
        exact = [mark for mark in map(self._exact_mark, numbers[-8:]) if mark.t < t]
        return max(exact, key=lambda mark: mark.t, default=None)

    def _exact_mark(self, number: int) -> Mark:
        """To the event with which the finding came up."""
        try:
            return self._found_mark(number)
        except NoSuchPlace:
            return self._looks[number].mark

    def _found_mark(self, number: int) -> Mark:
        if number not in self._exact:
            look = self._looks[number]
            at = bisect_right(self._snapshots, look.begin, key=lambda snapshot: snapshot.t) - 1
            cursor = Cursor(self._paths, self._snapshots[at].place, clocks=self._clocks)
            state = self._with_history(self._snapshots[at])
            while taken := cursor.take(4096, look.begin):
                state = fold(state, (event for _, event in taken))
            inside: list[tuple[float, AnyEvent]] = []
            while taken := cursor.take(4096, look.mark.t):
                inside += taken
            self._exact[number] = self._first_with(look.mark, state, inside)
        return self._exact[number]

    def _first_with(self, mark: Mark, state: RunState, inside: list[tuple[float, AnyEvent]]) -> Mark:
        low, high, title = 0, len(inside), mark.title
        while high - low > 1:
            middle = (low + high) // 2
            tried = fold(state, (event for _, event in inside[low:middle]))
            found = self._find(tried)
            if mark.key in found:
                high, title = middle, found[mark.key]
            else:
                low, state = middle, tried
        return Mark(inside[high - 1][0] if inside else mark.t, mark.key, title)


def _pieces(taken: list[tuple[float, AnyEvent]]) -> Iterator[list[tuple[float, AnyEvent]]]:
    """The same events, cut behind each telling one."""
    first = 0
    for number, (_, event) in enumerate(taken, 1):
        if number == len(taken) or isinstance(event, _TELLING):
            yield taken[first:number]
            first = number
