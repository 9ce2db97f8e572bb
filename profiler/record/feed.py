"""From a run's folder to its state: tail every log, merge what is there by time, fold it.

Reading (`RunTail`) and folding (`RunReader`) are apart, so that another source of events, such as
a replay by time stamp, can drive the same fold.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

from msgspec.structs import replace

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir

_TIME = attrgetter("t")

START_GRACE_SECONDS = 60.0
"""A run that has no supervisor this long after it was made never got one."""


class RunTail:
    """What all the logs of one run have gained since the last poll, in the order of time."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ranks: dict[int, EventTail] = {}
        self._others = (EventTail(run.events_path(HARDWARE)), EventTail(run.events_path(SUPERVISOR)))
        self._early: dict[EventTail, list[AnyEvent]] = {}
        """Read already, but another log has not been read beyond their time."""

    def poll(self, most_bytes: int | None = None) -> list[AnyEvent]:
        """All that is there; with `most_bytes` about so much of each log, to a time that all have passed."""
        for rank, path in self._run.rank_events().items():
            if rank not in self._ranks:
                self._ranks[rank] = EventTail(path)
        # The supervisor last: it starts a rank before the rank writes, so the start is then read too.
        read = {tail: tail.poll(most_bytes) for tail in (*self._ranks.values(), *self._others)}
        # A batch need not end with its newest event: a clock may have been set back.
        ends = [max(batch, key=_TIME).t for tail, batch in read.items() if tail.behind and batch]
        for tail, early in self._early.items():
            read[tail] = early + read[tail]
        filled = [batch for batch in read.values() if batch]
        if len(filled) == 1 and not ends:
            self._early = {}
            return filled[0]
        events = sorted((event for batch in filled for event in batch), key=_TIME)
        if not ends:
            self._early = {}
            return events
        # Of one time the logs come in their own order, so all of that time has to be there.
        until = min(ends)
        late = {tail: [event for event in batch if event.t >= until] for tail, batch in read.items()}
        self._early = {tail: batch for tail, batch in late.items() if batch}
        return events[: bisect_left(events, until, key=_TIME)]

    @property
    def behind(self) -> bool:
        """Whether there is more than the last poll was asked to read."""
        return bool(self._early) or any(tail.behind for tail in (*self._ranks.values(), *self._others))

    @property
    def skipped_lines(self) -> int:
        return sum(tail.skipped_lines for tail in (*self._ranks.values(), *self._others))


class RunReader:
    """The state of a run as far as its logs go. `poll` returns the same object while nothing changes."""

    def __init__(self, run: RunDir, *, wall: Callable[[], float] = time.time) -> None:
        self.run = run
        self._tail = RunTail(run)
        self._wall = wall
        self._folded = RunState(run_id=run.run_id)
        self._shown = self._folded

    @property
    def behind(self) -> bool:
        """Whether the logs hold more than the last poll was asked to read."""
        return self._tail.behind

    def poll(self, most_bytes: int | None = None) -> RunState:
        """With `most_bytes` about so much more of each log, so that a long run is seen while it is read."""
        # Asked before reading: a supervisor that ends in between has then written its end already.
        supervised = self._folded.ended is not None or self._supervised()
        folded = fold(self._folded, self._tail.poll(most_bytes))
        if self._tail.skipped_lines != folded.skipped_lines:
            folded = replace(folded, skipped_lines=self._tail.skipped_lines)
        lost = folded.ended is None and not supervised and not self._tail.behind
        if folded is not self._folded or lost != (self._shown.status == "lost"):
            self._folded = folded
            self._shown = replace(folded, status="lost") if lost else folded
        return self._shown

    def _supervised(self) -> bool:
        if self.run.supervisor_alive():
            return True
        if self.run.supervisor_identity() is not None:
            return False
        created = self.run.created()
        return created is not None and self._wall() - created < START_GRACE_SECONDS


def read_state(run: RunDir) -> RunState:
    """Everything that the logs of a run say now."""
    return RunReader(run).poll()
