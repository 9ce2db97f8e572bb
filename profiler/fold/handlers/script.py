"""How what is seen of a command of the user's own is folded."""

from __future__ import annotations

from msgspec.structs import replace

from llmtop.profiler.fold import changestate
from llmtop.profiler.fold.batch import Batch
from llmtop.profiler.fold.handlers.handler import Handler
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.scriptevents import (
    BatchSeen,
    DevicesFound,
    RankAttached,
    RankDetached,
    RunDescribed,
)


def _attached(batch: Batch, event: RankAttached) -> None:
    number = rank_of(event.src)
    if number is not None:
        batch.set_rank(replace(batch.rank(number), pid=event.pid, detached=None))
        # How many there are, only they can tell.
        batch.set(world_size=max(batch.state.world_size, event.world_size))


def _detached(batch: Batch, event: RankDetached) -> None:
    number = rank_of(event.src)
    if number is not None:
        batch.set_rank(replace(batch.rank(number), detached=event))


def _devices_found(batch: Batch, event: DevicesFound) -> None:
    batch.set(changes=changestate.describe(batch.state.changes, event.setting))


def _described(batch: Batch, event: RunDescribed) -> None:
    """The steps before were made on what is known only now: it is the setting of all of them."""
    batch.set(description=event)
    if event.setting is not None:
        batch.set(changes=changestate.describe(batch.state.changes, event.setting))


def _batch_seen(batch: Batch, event: BatchSeen) -> None:
    """Nothing that is not in the description that follows from it."""


HANDLERS: dict[type, Handler] = {
    RankAttached: _attached,
    RankDetached: _detached,
    DevicesFound: _devices_found,
    RunDescribed: _described,
    BatchSeen: _batch_seen,
}
