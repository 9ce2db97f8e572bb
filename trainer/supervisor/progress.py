"""What the ranks have told about themselves, read from their event logs, and whether they hang."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from llmtop.presets.spec import RunOptions
from llmtop.profiler.forecast import SETTLE_STEPS
from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.checkpointevents import CheckpointLoaded, CheckpointSaved
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import (
    AnyEvent,
    HangSuspected,
    OpBuilt,
    RankFailed,
    RankFinished,
    StageBegan,
    StageFinished,
    StepFinished,
    WeightsRead,
)
from llmtop.profiler.record.failureevents import StepHealed
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.profiler.record.stamping import set_back

STEPS_REMEMBERED = 50
_MOST_AT_ONCE = 512
_START_FACTOR = 2.0
"""A stage of start-up may read many gigabytes without a word."""


class Pulse(Protocol):
    """What tells whether a run gets on."""

    moved_at: float
    """When a rank last got on."""

    @property
    def stepped(self) -> bool: ...

    @property
    def last_step(self) -> int: ...

    @property
    def median_step_seconds(self) -> float | None: ...


class Progress:
    """Follows all ranks of a run. What earlier attempts wrote into the same logs is passed over."""

    def __init__(
        self,
        run: RunDir,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        last_step: int = 0,
        ahead_seconds: Callable[[int], float] = lambda rank: 0.0,
    ) -> None:
        """`last_step` is that of the ranks before; `ahead_seconds` how far the clock of a rank's machine is
        ahead of the one here: what is known of times is in the latter's."""
        self.world_size = world_size
        self.finished: dict[int, RankFinished] = {}
        self.failed: dict[int, RankFailed] = {}
        self.checkpoint: CheckpointSaved | None = None
        self.last_step = last_step
        self.stepped = False
        """Whether any rank of this attempt has finished a step."""
        self.moved_at = clock()
        """When a rank last got on: a step, a stage of start-up or a part of one, a checkpoint."""
        self.first_steps: dict[int, StepFinished] = {}
        """Rank to its first step of this attempt."""
        self.last_step_at: float | None = None
        """Wall clock at the end of rank 0's newest step."""
        self.settled_at: float | None = None
        """Wall clock of the step from which on memory that grows is a leak."""
        self.applied: dict[int, ChangeApplied] = {}
        """Rank to the newest change that it made."""
        self.snapshots: dict[int, SnapshotTaken] = {}
        """Rank to the newest that it has written, or not."""
        self.healed: dict[int, StepHealed] = {}
        """Rank to the newest step that it made again in smaller parts."""
        self.loaded_notes: dict[str, None] = {}
        """What a rank that goes on from a checkpoint says is not exactly as it was, each once."""
        self.stage_seconds: dict[str, float] = {}
        """Of rank 0's start-up."""
        self._clock = clock
        self._ahead_seconds = ahead_seconds
        self._seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._next = 0
        self._tails = {rank: EventTail(run.events_path(rank)) for rank in range(world_size)}
        for tail in self._tails.values():
            tail.poll()

    @property
    def median_step_seconds(self) -> float | None:
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def least_step_seconds(self) -> float | None:
        return min((seconds for seconds in self._seconds if seconds > 0.0), default=None)

    def poll(self, *, all_ranks: bool = False) -> None:
        """What was told since the last call; of thousands of ranks some at a time, unless `all_ranks`."""
        ranks = range(self.world_size)
        if not all_ranks and self.world_size > _MOST_AT_ONCE:
            ranks = range(self._next, min(self._next + _MOST_AT_ONCE, self.world_size))
            self._next = ranks.stop % self.world_size
        for rank in ranks:
            events = self._tails[rank].poll()
            ahead = self._ahead_seconds(rank) if events else 0.0
            for event in events:
                if ahead:
                    set_back(event, ahead)
                self._note(rank, event)

    def _note(self, rank: int, event: AnyEvent) -> None:
        match event:
            case StepFinished():
                self._note_step(rank, event)
            case CheckpointSaved():
                self.checkpoint = event
                self.moved_at = self._clock()
            case CheckpointLoaded():
                self.loaded_notes.update(dict.fromkeys(event.notes))
                self.moved_at = self._clock()
            case ChangeApplied():
                self.applied[rank] = event
            case SnapshotTaken() if event.number:
                self.snapshots[rank] = event
                self.moved_at = self._clock()
            case StepHealed():
                self.healed[rank] = event
                self.moved_at = self._clock()
            case StageFinished() if rank == 0:
                self.stage_seconds[event.stage] = event.seconds
                self.moved_at = self._clock()
            case StageBegan() | StageFinished() | OpBuilt() | WeightsRead():
                self.moved_at = self._clock()
            case RankFinished():
                self.finished[rank] = event
            case RankFailed():
                self.failed.setdefault(rank, event)
            case _:
                pass

    def _note_step(self, rank: int, event: StepFinished) -> None:
        self.last_step = max(self.last_step, event.step)
        self.stepped = True
        self.first_steps.setdefault(rank, event)
        if rank == 0:
            self.last_step_at = event.t
            if self.settled_at is None and event.step >= self.first_steps[0].step + SETTLE_STEPS:
                self.settled_at = event.t
        if not event.profiled:
            self._seconds.append(event.step_seconds)
        self.moved_at = self._clock()


class HangWatch:
    """Suspects a hang once, until the ranks get on again."""

    def __init__(self, options: RunOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._floor_seconds = options.hang_floor_seconds
        self._factor = options.hang_factor
        self._clock = clock
        self._suspected_at: float | None = None

    def check(self, progress: Pulse, *, compiling: bool) -> HangSuspected | None:
        """The event to write now, if any. A compiler at work is no hang."""
        if compiling:
            progress.moved_at = self._clock()
        if self._suspected_at is not None and progress.moved_at <= self._suspected_at:
            return None
        self._suspected_at = None
        floor = self._floor_seconds if progress.stepped else _START_FACTOR * self._floor_seconds
        threshold = max(floor, self._factor * (progress.median_step_seconds or 0.0))
        quiet = self._clock() - progress.moved_at
        if quiet < threshold:
            return None
        self._suspected_at = progress.moved_at
        return HangSuspected(last_step=progress.last_step, quiet_seconds=quiet, threshold_seconds=threshold)
