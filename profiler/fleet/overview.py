"""One line for each host of a run: what the table of hosts shows and what metrics tell. Pure."""

from __future__ import annotations

from statistics import median
from typing import Literal

from msgspec import Struct

from llmtop.profiler.findings.finding import SEVERITIES
from llmtop.profiler.fleet.behind import steps_behind
from llmtop.profiler.fleet.findings import SILENT_SECONDS, HostFinding
from llmtop.profiler.fleet.fleetstate import FleetState, HostState
from llmtop.profiler.fleet.summary import ALONE, STEP, Spread
from llmtop.profiler.fold.runstate import ENDED, Status

HostStatus = Literal["waiting", "absent", "lost", "silent", "left"] | Status
"""`waiting`: it has told nothing yet; `absent`: it was never there; `silent`: for long; `lost`: the lead says
that it does not answer; `left`: its part is over."""

_SEVERITIES = (*SEVERITIES, "")
_GONE: tuple[HostStatus, ...] = ("lost", "absent", "failed", "out_of_memory", "silent")


class HostRow(Struct, frozen=True, kw_only=True):
    """One line of the table of hosts. None: not known."""

    name: str
    first_rank: int
    ranks: int
    alive: int = 0
    status: HostStatus = "waiting"
    step: int = 0
    behind: int = 0
    """Steps that the farthest host is ahead of it; 0 while it keeps up."""
    step_seconds: Spread | None = None
    alone: Spread | None = None
    excess: float | None = None
    """How much longer its slowest rank's loading and forward take than the usual host's: a share."""
    peak_bytes: Spread | None = None
    busy_percent: float | None = None
    """Of its usual GPU; on the CPU kind of the machine."""
    memory_share: float | None = None
    """Of the host's memory that is in use."""
    network_bytes_per_second: float | None = None
    """Received and sent together."""
    quiet_seconds: float | None = None
    severity: str = ""
    """Of the worst that is known of it; empty: nothing stands out."""
    note: str = ""
    """That worst, in words."""

    @property
    def worst_first(self) -> tuple[int, bool, int, float, int]:
        """Sorts hosts: of those that are as bad, the ones that are gone first."""
        severity, excess = _SEVERITIES.index(self.severity), self.excess or 0.0
        return severity, self.status not in _GONE, -self.behind, -excess, self.first_rank


def host_rows(
    fleet: FleetState, found: tuple[HostFinding, ...], quiet: dict[str, float], *, goes_on: bool
) -> tuple[HostRow, ...]:
    """In the order of their ranks. `found` is the worst first; `quiet`: how long each has told nothing."""
    hosts = fleet.hosts.values()
    worst: dict[str, HostFinding] = {}
    for one in found:
        worst.setdefault(one.host, one)  # the worst come first
    told = [host.summary for host in hosts if host.summary is not None]
    behind = steps_behind(tuple(hosts))
    usual = [one.seconds[ALONE].median for one in told if ALONE in one.seconds]
    alone = median(usual) if usual else 0.0
    return tuple(
        _row(
            host,
            worst.get(host.name),
            quiet.get(host.name),
            behind.get(host.name, 0),
            alone,
            goes_on=goes_on,
        )
        for host in hosts
    )


def _row(
    host: HostState,
    found: HostFinding | None,
    quiet: float | None,
    behind: int,
    usual_alone: float,
    *,
    goes_on: bool,
) -> HostRow:
    told = host.summary
    status = _status(host, quiet, goes_on=goes_on)
    severity, note = (found.severity, _of_itself(found.title, host.name)) if found is not None else ("", "")
    if told is None:
        return HostRow(
            name=host.name,
            first_rank=host.first_rank,
            ranks=host.ranks,
            status=status,
            severity=severity,
            note=note,
        )
    if told.worst and not note:
        severity, note = told.worst[0].severity, told.worst[0].title
    own = told.seconds.get(ALONE)
    busy = told.figures.get("utilization_percent")
    rates = [r for r in (told.receive_bytes_per_second, told.send_bytes_per_second) if r is not None]
    return HostRow(
        name=host.name,
        first_rank=host.first_rank,
        ranks=host.ranks,
        alive=told.alive,
        status=status,
        step=told.step,
        behind=behind,
        step_seconds=told.seconds.get(STEP),
        alone=own,
        excess=own.high / usual_alone - 1 if own is not None and usual_alone > 0 else None,
        peak_bytes=told.peak_bytes,
        busy_percent=busy.median if busy is not None else told.cpu_percent,
        memory_share=_share(told.memory_used_bytes, told.memory_total_bytes),
        network_bytes_per_second=sum(rates) if rates else None,
        quiet_seconds=quiet,
        severity=severity,
        note=note,
    )


def _of_itself(title: str, name: str) -> str:
    """What is said of a host, in its own row."""
    waited = title.removeprefix("all hosts wait for ")
    if waited != title:
        rank = waited.partition(" of host ")[0]
        return f"{rank} is slow" if rank != waited else "it is slow"
    return title.replace(f" of host {name}", "").replace(f"host {name} ", "")


def _share(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else used / total


def _status(host: HostState, quiet: float | None, *, goes_on: bool) -> HostStatus:
    if goes_on and host.lost is not None:
        return "lost"
    told = host.summary
    if told is None:
        if host.left is None:
            return "waiting"
        return "left" if host.left.was_there else "absent"
    if told.status == "lost" or (told.status not in ENDED and host.left is not None):
        return "left"
    if goes_on and told.status not in ENDED and quiet is not None and quiet > SILENT_SECONDS:
        return "silent"
    return told.status
