"""From a run's folder to its state: tail every log, merge what is there by time, fold it.

Reading (`RunTail`) and folding (`RunReader`) are apart, so that another source of events, such as
a replay by time stamp, can drive the same fold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter

from msgspec.structs import replace

from llmtop.profiler.eventlog import EventTail
from llmtop.profiler.events import AnyEvent
from llmtop.profiler.rundir import HARDWARE, SUPERVISOR, RunDir
from llmtop.profiler.runstate import RunState, fold

START_GRACE_SECONDS = 60.0
"""A run that has no supervisor this long after it was made never got one."""


class RunTail:
    """What all the logs of one run have gained since the last poll, in the order of time."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._ranks: dict[int, EventTail] = {}
        self._others = (EventTail(run.events_path(HARDWARE)), EventTail(run.events_path(SUPERVISOR)))

    def poll(self) -> list[AnyEvent]:
        for rank, path in self._run.rank_events().items():
            if rank not in self._ranks:
                self._ranks[rank] = EventTail(path)
        # The supervisor last: it starts a rank before the rank writes, so the start is then read too.
        batches = [tail.poll() for tail in (*self._ranks.values(), *self._others)]
        filled = [batch for batch in batches if batch]
        if len(filled) == 1:
            return filled[0]
        return sorted((event for batch in filled for event in batch), key=attrgetter("t"))

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

    def poll(self) -> RunState:
        # Asked before reading: a supervisor that ends in between has then written its end already.
        supervised = self._folded.ended is not None or self._supervised()
        folded = fold(self._folded, self._tail.poll())
        if self._tail.skipped_lines != folded.skipped_lines:
            folded = replace(folded, skipped_lines=self._tail.skipped_lines)
        lost = folded.ended is None and not supervised
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
