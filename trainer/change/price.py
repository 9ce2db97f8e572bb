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
    known = saved is not None and saved.seconds > 0 and saved.size_bytes > 0
    size = saved.size_bytes if known and saved else state_bytes(plan.old, plan.old_prediction)
    rate = saved.size_bytes / saved.seconds if known and saved else _ASSUMED_BYTES_PER_SECOND
    # The next ranks import while these still train.
    started = [seconds for stage, seconds in stage_seconds.items() if stage != "import"]
    start = sum(started) if started else None
    # Written once and read once.
    down = None if start is None else start + _END_SECONDS + 2 * size / rate
    return Price(down_seconds=down, state_bytes=size, measured=known)
