"""Folds what is told of hosts into the state of a run, which has nothing of it yet."""

from __future__ import annotations

from llmtop.profiler.fold.batch import Batch
from llmtop.profiler.fold.handlers.handler import Handler
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.hostevents import (
    ClockMeasured,
    HostFound,
    HostJoined,
    HostLeft,
    HostLost,
    OrderCarriedOut,
    StandbyEnded,
)


def _no_part_of_it(_batch: Batch, _event: AnyEvent) -> None:
    return


HANDLERS: dict[type, Handler] = {
    HostJoined: _no_part_of_it,
    HostLost: _no_part_of_it,
    HostFound: _no_part_of_it,
    HostLeft: _no_part_of_it,
    ClockMeasured: _no_part_of_it,
    OrderCarriedOut: _no_part_of_it,
    StandbyEnded: _no_part_of_it,
}
