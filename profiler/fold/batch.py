"""One call of the fold, while it is under way."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from llmtop.profiler.fold.memorytrail import TrailBuilder
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import SeriesBuilder
from llmtop.profiler.fold.stepfold import StepFolder
from llmtop.profiler.record.events import HardwareSampled, StepFinished


class Batch:
    """One call of `fold`: what grows with the run is kept mutable inside and frozen at the end.

    A batch costs its own events plus one copy of the bounded state, so folding is linear.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._now = state.now
        self._ranks: dict[int, RankState] | None = None
        self._series: SeriesBuilder | None = None
        self._trail: TrailBuilder | None = None
        self._steps: dict[int, StepFolder] = {}
        """Ranks with steps that are not in `_ranks` yet."""

    def see_time(self, t: float) -> None:
        """Wall clock of an event; the newest one counts."""
        if self._now is None or t > self._now:
            self._now = t

    def freeze(self) -> RunState:
        self._settle(*self._steps)
        changes: dict[str, Any] = {}
        if self._now != self.state.now:
            changes["now"] = self._now
        if self._ranks is not None:
            changes["ranks"] = self._ranks
        if self._series is not None:
            changes["series"] = self._series.freeze()
        if self._trail is not None:
            changes["memory_trail"] = self._trail.freeze()
        return replace(self.state, **changes) if changes else self.state

    def set(self, **changes: Any) -> None:
        """Fields of the run's state."""
        self.state = replace(self.state, **changes)

    def _settle(self, *ranks: int) -> None:
        """What a rank's steps have changed becomes part of it."""
        for number in ranks:
            folder = self._steps.pop(number, None)
            if folder is not None:
                self.set_rank(folder.freeze())

    def add_step(self, number: int, event: StepFinished) -> None:
        folder = self._steps.get(number)
        if folder is None:
            folder = self._steps[number] = StepFolder(self.rank(number))
        folder.add(event)

    def rank(self, number: int) -> RankState:
        self._settle(number)
        known = self.state.ranks if self._ranks is None else self._ranks
        return known.get(number) or RankState(rank=number)

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        known = self.state.ranks if self._ranks is None else self._ranks
        return tuple(sorted({*known, *self._steps}))

    def set_rank(self, rank: RankState) -> None:
        ranks = self.state.changes.ranks
        if ranks is not None and rank.rank >= ranks:
            return  # a late line of a rank that the run has no more
        if self.state.host_ranks is not None and rank.rank not in self.state.ranks_here:
            return  # of another host
        if self._ranks is None:
            self._ranks = dict(self.state.ranks)
        self._ranks[rank.rank] = rank

    def drop_ranks(self, world_size: int) -> None:
        """Forget those that the run has no more."""
        self._settle(*self._steps)
        known = self.state.ranks if self._ranks is None else self._ranks
        self._ranks = {number: rank for number, rank in known.items() if number < world_size}

    def add_point(self, event: StepFinished, launch: int) -> None:
        if self._series is None:
            self._series = SeriesBuilder(self.state.series)
        self._series.add(event, launch)

    def add_sample(self, event: HardwareSampled) -> None:
        if self._trail is None:
            self._trail = TrailBuilder(self.state.memory_trail)
        self._trail.add(event)
