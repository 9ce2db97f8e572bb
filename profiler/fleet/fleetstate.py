"""What is known of all hosts of a run: one immutable value, folded from what they and the lead say."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from llmtop.profiler.fleet.summary import STEP, HostSummarised
from llmtop.profiler.record.eventbase import Event
from llmtop.profiler.record.hostevents import ClockMeasured, HostFound, HostJoined, HostLeft, HostLost
from llmtop.profiler.record.hosts import Hosts

TRAIL = 60
"""How many of a host's step times are kept, of its newest summaries."""


class HostState(Struct, frozen=True, kw_only=True):
    name: str
    first_rank: int
    ranks: int
    summary: HostSummarised | None = None
    """The newest."""
    trail: tuple[float, ...] = ()
    """The slowest rank's step in each of the newest summaries, the oldest first."""
    joined: HostJoined | None = None
    lost: HostLost | None = None
    """While it does not answer."""
    losses: int = 0
    """How often it has not answered."""
    found: HostFound | None = None
    """The last time that it answered again."""
    left: HostLeft | None = None
    clock: ClockMeasured | None = None

    @property
    def told_at(self) -> float | None:
        """When it said its newest summary, by the launching machine's clock."""
        return None if self.summary is None else self.summary.t - self.clock_offset_seconds

    @property
    def clock_offset_seconds(self) -> float:
        """How far its clock is ahead, as far as that was measured."""
        return self.clock.offset_seconds if self.clock is not None else 0.0


class FleetState(Struct, frozen=True, kw_only=True):
    hosts: dict[str, HostState] = field(default_factory=dict)
    """By name, in the order of their ranks."""


def fleet_of(hosts: Hosts) -> FleetState:
    """Before anything was told."""
    made = (HostState(name=one.name, first_rank=one.first_rank, ranks=len(one.slots)) for one in hosts.hosts)
    return FleetState(hosts={host.name: host for host in made})


def fold_fleet(state: FleetState, events: Iterable[Event]) -> FleetState:
    """Apply events in order; those of other kinds and of hosts that the run has not are passed over."""
    hosts: dict[str, HostState] | None = None
    for event in events:
        known = state.hosts if hosts is None else hosts
        name = getattr(event, "host", None)
        before = known.get(name) if isinstance(name, str) else None
        if before is None:
            continue
        after = _folded(before, event)
        if after is not before:
            hosts = dict(state.hosts) if hosts is None else hosts
            hosts[before.name] = after
    return state if hosts is None else FleetState(hosts=hosts)


def _folded(host: HostState, event: Event) -> HostState:
    match event:
        case HostSummarised():
            step = event.seconds.get(STEP)
            trail = host.trail if step is None else (*host.trail[1 - TRAIL :], step.high)
            return replace(host, summary=event, trail=trail)
        case HostJoined():
            return replace(host, joined=event, left=None)
        case HostLost():
            return replace(host, lost=event, losses=host.losses + 1)
        case HostFound():
            return replace(host, lost=None, found=event)
        case HostLeft():
            return replace(host, left=event, lost=None)
        case ClockMeasured():
            return replace(host, clock=event)
        case _:
            return host
