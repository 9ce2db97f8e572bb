"""What stands out among the hosts of a run: who is gone, which link failed, who makes the others wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from llmtop.profiler.findings.clocks import SET_TIME, off_words
from llmtop.profiler.findings.finding import Finding, Severity, worst_first
from llmtop.profiler.findings.speed import STRAGGLER_FLOOR_SECONDS, STRAGGLER_SHARE
from llmtop.profiler.fleet.behind import steps_behind
from llmtop.profiler.fleet.fleetstate import FleetState, HostState
from llmtop.profiler.fleet.summary import ALONE
from llmtop.profiler.record.hostclock import CLOCK_SECONDS
from llmtop.profiler.units import counted, format_seconds

SILENT_SECONDS = 30.0
"""A host that says nothing for longer than this is named; summaries come in 2 to 10 s."""
MOST_NAMED = 3
_MORE = {
    "host_lost": "do not answer",
    "host_silent": "tell nothing",
    "host_found": "answer again",
    "link_down": "have a link that is down",
    "link_lost": "had a link that went down",
    "network_errors": "get damaged data",
    "rank_failed": "have a rank that failed",
    "device_lost": "have lost a GPU",
}
"""Key to what is said of several hosts."""


class HostFinding(Finding, frozen=True, kw_only=True):
    host: str = ""
    """Where to look; empty where it is about several."""


def fleet_findings(
    fleet: FleetState, run_id: str, quiet_seconds: dict[str, float], *, goes_on: bool
) -> tuple[HostFinding, ...]:
    """The worst first. `quiet_seconds`: how long each host has told nothing, for those that have told any."""
    hosts = tuple(fleet.hosts.values())
    found = [
        *(one for host in hosts for one in _of_host(host, run_id, quiet_seconds.get(host.name), goes_on)),
        *(_slowest(hosts) if goes_on else ()),
        *(_behind(hosts) if goes_on else ()),
        *_common(hosts),
        *_clocks(hosts),
    ]
    return worst_first(found)


def gathered(found: Sequence[HostFinding]) -> tuple[HostFinding, ...]:
    """The worst first; of what is said of many hosts only the first few, and how many more there are."""
    hosts: dict[str, dict[str, HostFinding]] = {}
    shown: list[HostFinding] = []
    for one in found:
        alike = hosts.setdefault(one.key, {})
        alike.setdefault(one.host, one)
        if one.key not in _MORE or one.host in list(alike)[:MOST_NAMED]:
            shown.append(one)
    for key, alike in hosts.items():
        if len(alike) > MOST_NAMED and key in _MORE:
            shown.append(_rest(list(alike.values())[MOST_NAMED:]))
    # Sorting keeps the order of equals, so what is more of a kind comes after what is as bad.
    return worst_first(shown)


def _rest(alike: Sequence[HostFinding]) -> HostFinding:
    """One of each host."""
    first = alike[0]
    return HostFinding(
        key=first.key,
        severity=first.severity,
        title=f"{counted(len(alike), 'more host')} {_MORE[first.key]}",
        evidence=_named([one.host for one in alike]),
        change=first.change,
    )


def _of_host(host: HostState, run_id: str, quiet: float | None, goes_on: bool) -> Iterator[HostFinding]:
    if goes_on:
        yield from _presence(host, run_id, quiet)
    yield from _links(host)
    told = host.summary
    for rank, why in ((one.rank, one.why) for one in told.failed) if told is not None else ():
        yield HostFinding(
            key="rank_failed",
            severity="critical",
            title=f"rank {rank} of host {host.name} failed",
            evidence=why,
            change=f"what it wrote last: llmtop logs {run_id} --rank {rank}",
            command=f"llmtop logs {run_id} --rank {rank}",
            host=host.name,
        )
    if told is not None and told.devices_lost:
        gone = ", ".join(map(str, told.devices_lost))
        yield HostFinding(
            key="device_lost",
            severity="critical",
            title=f"GPU {gone} of host {host.name} is lost",
            evidence=f"the driver does not reach it; {counted(told.xids, 'Xid error')} so far",
            change="the host has to be restarted, or its GPU reset; leave the host out until then",
            host=host.name,
        )


def _presence(host: HostState, run_id: str, quiet: float | None) -> Iterator[HostFinding]:
    step = host.summary.step if host.summary is not None else 0
    if host.lost is not None:
        yield HostFinding(
            key="host_lost",
            severity="critical",
            title=f"host {host.name} does not answer",
            evidence=f"for {format_seconds(max(quiet or 0.0, host.lost.quiet_seconds))}"
            f"; its last step told is {step:,}" + (f"; {host.lost.reason}" if host.lost.reason else ""),
            change="its ranks may go on, and are seen again when it answers; where it is down the run can"
            f" only be stopped: llmtop stop {run_id}",
            host=host.name,
        )
        return
    if host.left is None and quiet is not None and quiet > SILENT_SECONDS:
        yield HostFinding(
            key="host_silent",
            severity="warning",
            title=f"host {host.name} tells nothing",
            evidence=f"for {format_seconds(quiet)}; its last step told is {step:,}",
            change="it is very busy, its disk is full or its supervisor is gone: its own log says which",
            host=host.name,
        )
    if host.found is not None:
        times = "" if host.losses < 2 else f", {host.losses} times so far"
        yield HostFinding(
            key="host_found",
            severity="info",
            title=f"host {host.name} answers again",
            evidence=f"it was away for {format_seconds(host.found.away_seconds)}{times}",
            change="where this comes again, look at its network and its load",
            host=host.name,
        )


def _links(host: HostState) -> Iterator[HostFinding]:
    told = host.summary
    if told is None:
        return
    if told.links_down:
        yield HostFinding(
            key="link_down",
            severity="critical",
            title=f"link {', '.join(told.links_down)} of host {host.name} is down",
            evidence="it was up when the run began",
            change="look at its cable, its port and the switch",
            host=host.name,
        )
    elif told.link_losses:
        yield HostFinding(
            key="link_lost",
            severity="warning",
            title=f"links of host {host.name} went down and came back",
            evidence=f"{counted(told.link_losses, 'time')} since the run began",
            change="a bad cable or port; collectives wait or fail while it lasts",
            host=host.name,
        )
    if told.network_errors:
        yield HostFinding(
            key="network_errors",
            severity="warning",
            title=f"data comes damaged over the links of host {host.name}",
            evidence=f"{counted(told.network_errors, 'error')} since the run began",
            change="a bad cable or port: it is sent again, which is slow",
            host=host.name,
        )


def _slowest(hosts: Sequence[HostState]) -> Iterator[HostFinding]:
    """By what ranks do alone: in the rest of a step all wait for the slowest."""
    alone = {
        host.name: host.summary.seconds[ALONE]
        for host in hosts
        if host.summary is not None and ALONE in host.summary.seconds
    }
    if len(alone) < 2:
        return
    name = max(alone, key=lambda host: alone[host].high)
    slow, usual = alone[name], median(one.median for host, one in alone.items() if host != name)
    excess = slow.high - usual
    if excess < STRAGGLER_FLOOR_SECONDS or excess < STRAGGLER_SHARE * usual:
        return
    whole = slow.low - usual >= excess / 2
    yield HostFinding(
        key="slowest_host",
        severity="warning",
        title=f"all hosts wait for {'host' if whole else f'rank {slow.rank} of host'} {name}",
        evidence=f"loading and forward take {format_seconds(slow.high)} there, elsewhere"
        f" {format_seconds(usual)}: {format_seconds(excess)} a step"
        + (", on all of its ranks" if whole else ""),
        change="look for other work, heat or a lower clock there",
        host=name,
    )


def _behind(hosts: Sequence[HostState]) -> Iterator[HostFinding]:
    behind = steps_behind(hosts)
    names = [name for name, steps in behind.items() if steps]
    told = {host.name: host.summary.step for host in hosts if host.summary is not None}
    if not names or len(names) == len(told):
        return
    last = min(told[name] for name in names)
    yield HostFinding(
        key="host_behind",
        severity="warning",
        title=f"{_named(names)} {'is' if len(names) == 1 else 'are'} behind",
        evidence=f"at step {last:,}, others at {max(told.values()):,}",
        change="where it stays so, see where its ranks stand",
        host=names[0] if len(names) == 1 else "",
    )


def _common(hosts: Sequence[HostState]) -> Iterator[HostFinding]:
    """What hosts say of themselves, each once with those that say it."""
    who: dict[tuple[Severity, str], list[tuple[str, str]]] = {}
    for host in hosts:
        for one in host.summary.worst if host.summary is not None else ():
            severity: Severity = "critical" if one.severity == "critical" else "warning"
            if one.severity != "info":
                who.setdefault((severity, one.key), []).append((host.name, one.title))
    for (severity, key), told in who.items():
        names = [name for name, _ in told]
        yield HostFinding(
            key=key,
            severity=severity,
            title=told[0][1],
            evidence=f"on {_named(names)}",
            change="that host's own view has the figures and what to do",
            host=names[0],
        )


def _clocks(hosts: Sequence[HostState]) -> Iterator[HostFinding]:
    clocks = [host.clock for host in hosts if host.clock is not None]
    off = [clock for clock in clocks if abs(clock.offset_seconds) > max(CLOCK_SECONDS, clock.error_seconds)]
    if not off:
        return
    most = max(off, key=lambda clock: abs(clock.offset_seconds))
    whose = f"the clock of {_named([most.host])} differs"
    if len(off) > 1:
        whose = f"the clocks of {len(off):,} of {len(clocks):,} hosts differ"
    yield HostFinding(
        key="clocks_differ",
        severity="info",
        title=f"{whose}, which is corrected",
        evidence=("the most that of " + most.host + ": " if len(off) > 1 else "")
        + f"{off_words(most.offset_seconds)}, measured to {format_seconds(most.error_seconds)}",
        change=SET_TIME,
        host=most.host,
    )


def _named(names: Sequence[str]) -> str:
    shown, more = ", ".join(names[:MOST_NAMED]), len(names) - MOST_NAMED
    return ("host " if len(names) == 1 else "hosts ") + shown + (f" and {more} more" if more > 0 else "")
