"""What a change costs in time, from what this run has measured of itself."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.trainer.change.plan import ChangePlan
from llmtop.trainer.change.restagefolder import state_bytes

_ASSUMED_BYTES_PER_SECOND = 1e9
"""Of saving and of loading, where the run has not saved yet: below what a local NVMe drive does."""
_END_SECONDS = 1.0
"""From the last word of the ranks to the start of the next ones."""


class Price(Struct, frozen=True, kw_only=True):
    down_seconds: float | None
    """None: not known, as the run has not started up yet."""
    state_bytes: int
    """What is saved and read again; 0 for a change between two steps."""
    measured: bool = True
    """The rate of saving is this run's own."""


def price_of(plan: ChangePlan, stage_seconds: Mapping[str, float], saved: CheckpointSaved | None) -> Price:
    """`stage_seconds` are of the run's own start-up."""
    if not plan.restage:
        return Price(down_seconds=0.0, state_bytes=0)
    measured = saved is not None and saved.seconds > 0 and saved.size_bytes > 0
    if saved is not None and measured:
        size_bytes, one_way_seconds = saved.size_bytes, saved.seconds
    else:
        size_bytes = state_bytes(plan.old, plan.old_prediction)
        one_way_seconds = size_bytes / _ASSUMED_BYTES_PER_SECOND
    # The next ranks import while these still train.
    started = [seconds for stage, seconds in stage_seconds.items() if stage != "import"]
    # The state is written once and read once.
    down_seconds = sum(started) + _END_SECONDS + 2 * one_way_seconds if started else None
    return Price(down_seconds=down_seconds, state_bytes=size_bytes, measured=measured)
