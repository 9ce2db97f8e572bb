"""What the watched processes of a script have told, read from their event logs."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent, RankFailed, RankFinished, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import BatchSeen, RankAttached
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.trainer.supervisor.progress import STEPS_REMEMBERED


class ScriptProgress:
    """Follows all ranks that there are; more may come at any time. A `Pulse` for the watch over hangs."""

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self.attached: dict[int, RankAttached] = {}
        self.failed: dict[int, RankFailed] = {}
        self.finished: dict[int, RankFinished] = {}
        self.batch: BatchSeen | None = None
        """The largest of rank 0 so far."""
        self.snapshots: dict[int, SnapshotTaken] = {}
        """The newest of each rank."""
        self.last_step = 0
        self.stepped = False
        self.moved_at = clock()
        self._run = run
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._tails: dict[int, EventTail] = {}
        self._news = False

    @property
    def median_step_seconds(self) -> float | None:
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def least_step_seconds(self) -> float | None:
        return min((seconds for seconds in self._seconds if seconds > 0.0), default=None)

    @property
    def pids(self) -> dict[int, int]:
        """Of the watched processes, by rank."""
        return {rank: attached.pid for rank, attached in self.attached.items()}

    @property
    def world_size(self) -> int:
        """Ranks, by what they say themselves; 1 before any has."""
        return max((attached.world_size for attached in self.attached.values()), default=1)

    def poll(self) -> None:
        for rank, path in self._run.rank_events().items():
            if rank not in self._tails:
                self._tails[rank] = EventTail(path)
            for event in self._tails[rank].poll():
                self._note(rank, event)

    def take_news(self) -> bool:
        """Whether more is known of rank 0's model or batch than at the last call."""
        news, self._news = self._news, False
        return news

    def _note(self, rank: int, event: AnyEvent) -> None:
        match event:
            case RankAttached():
                self.attached[rank] = event
                self.moved_at = self._clock()
                self._news = self._news or rank == 0
            case BatchSeen() if rank == 0:
                self.batch = event
                self._news = True
            case StepFinished():
                self.last_step = max(self.last_step, event.step)
                # Where no batch is seen by then, none will be.
                self._news = self._news or not self.stepped
                self.stepped = True
                if not event.profiled:
                    self._seconds.append(event.step_seconds)
                self.moved_at = self._clock()
            case SnapshotTaken() if event.number:
                self.snapshots[rank] = event
                self.moved_at = self._clock()
            case RankFinished():
                self.finished[rank] = event
            case RankFailed():
                self.failed.setdefault(rank, event)
            case _:
                pass
