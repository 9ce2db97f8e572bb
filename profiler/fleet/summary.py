"""What a host says of all its ranks together: one event of bounded size, whatever the run's length.

`hosts/NAME/summary.jsonl` has one a line, as other logs of the record have theirs, written by the host's
supervisor alone. A viewer of many hosts reads these and no rank's log.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import median

import msgspec
from msgspec import Struct

from llmtop.profiler.fold.runstate import Status
from llmtop.profiler.record.eventbase import Event

STEP = "step"
ALONE = "alone"
"""Loading and forward: below ZeRO-3 a rank waits for no other in it, so it tells who is slow."""
DIGITS = 6
"""Of a number that was measured: more of them only make lines longer."""
MOST_WORST, MOST_FAILED = 3, 4


class Spread(Struct, frozen=True, array_like=True, gc=False):
    """One figure over the ranks of a host, written as a list."""

    low: float
    median: float
    high: float
    rank: int
    """That has the high one: the slowest, the fullest."""


class Worst(Struct, frozen=True, array_like=True):
    """A finding of the host, without what it is made of: the host's own view has that."""

    severity: str
    key: str
    title: str


class FailedRank(Struct, frozen=True, array_like=True):
    rank: int
    why: str


class HostSummarised(Event, frozen=True, kw_only=True, tag="host_summarised"):
    """The ranks of one host at one time. None and absent: not known."""

    host: str
    status: Status = "starting"
    first_rank: int = 0
    ranks: int = 0
    """That the host is to have."""
    alive: int = 0
    """That were started and have not ended."""
    setting: int = 0
    step: int = 0
    """The newest that all ranks of the host have finished."""
    ahead_step: int = 0
    """The newest that any of them has finished."""
    loss: float | None = None
    """Told by the host that has rank 0."""
    tokens_per_second: float | None = None
    """Of the whole job, by the steps of this host's first rank."""
    seconds: dict[str, Spread] = {}
    """Means of a step's parts over the steps since the summary before: `STEP`, `ALONE` and each `Phase`."""
    peak_bytes: Spread | None = None
    """Of any phase of any step so far."""
    components: dict[str, Spread] = {}
    """Bytes by component at the fullest moment that was looked into."""
    figures: dict[str, Spread] = {}
    """Readings of the GPUs by the names that samples have; a GPU is called by its rank."""
    rss_bytes: Spread | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    cpu_percent: float | None = None
    receive_bytes_per_second: float | None = None
    send_bytes_per_second: float | None = None
    network_errors: int | None = None
    """Since the run was first looked at, as the next one."""
    link_losses: int | None = None
    links_down: tuple[str, ...] = ()
    devices_lost: tuple[int, ...] = ()
    """Indices of GPUs that do not answer."""
    xids: int = 0
    hang_seconds: float | None = None
    findings: dict[str, int] = {}
    """Severity to how many there are."""
    worst: tuple[Worst, ...] = ()
    failed: tuple[FailedRank, ...] = ()
    """At most `MOST_FAILED` of the ranks that failed."""


def spread(values: Mapping[int, float | None]) -> Spread | None:
    """Of a figure by rank; None where no rank has it. Of equal ones the lowest rank has the high one."""
    known = {rank: value for rank, value in sorted(values.items()) if value is not None}
    if not known:
        return None
    slowest = max(known, key=lambda rank: known[rank])
    return Spread(
        shortened(min(known.values())), shortened(median(known.values())), shortened(known[slowest]), slowest
    )


def shortened(value: float) -> float:
    """With the digits that a measured number has."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


@cache
def decoder() -> msgspec.json.Decoder[HostSummarised]:
    return msgspec.json.Decoder(HostSummarised)
