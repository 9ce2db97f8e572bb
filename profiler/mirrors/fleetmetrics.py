"""All hosts of a run for Prometheus, from their summaries: served where the run was launched.

A few dozen samples a host, whatever its ranks and the length of the run. What single ranks and GPUs do, the
endpoint of each host tells (`openmetrics.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from prometheus_client.core import GaugeMetricFamily, Metric

from llmtop.profiler.findings.finding import SEVERITIES
from llmtop.profiler.fleet.findings import fleet_findings
from llmtop.profiler.fleet.fleetstate import HostState
from llmtop.profiler.fleet.overview import HostRow, host_rows
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.fleet.summary import ALONE, STEP, HostSummarised, Spread
from llmtop.profiler.fold.runstate import ENDED, RunState

_STATS = ("low", "median", "high")


class SeenHost(Struct, frozen=True, kw_only=True):
    """One host at one scrape."""

    host: HostState
    row: HostRow

    @property
    def told(self) -> HostSummarised | None:
        return self.host.summary


class SeenFleet(Struct, frozen=True, kw_only=True):
    run_id: str
    state: RunState
    """As the lead says."""
    hosts: tuple[SeenHost, ...]


Samples = Iterator[tuple[tuple[str, ...], float | None]]
"""Label values besides run and host, and the value; None: not known, so there is no sample."""


class HostFamily(Struct, frozen=True, kw_only=True):
    """One row of the table of metrics; every one has the labels `run` and `host`."""

    name: str
    help: str
    read: Callable[[SeenHost], Samples]
    labels: tuple[str, ...] = ()


def _one(value: Callable[[SeenHost], float | None]) -> Callable[[SeenHost], Samples]:
    def read(seen: SeenHost) -> Samples:
        yield (), value(seen)

    return read


def _told(value: Callable[[HostSummarised], float | None]) -> Callable[[SeenHost], Samples]:
    return _one(lambda seen: None if seen.told is None else value(seen.told))


def _spread(find: Callable[[HostSummarised], Spread | None]) -> Callable[[SeenHost], Samples]:
    def read(seen: SeenHost) -> Samples:
        found = find(seen.told) if seen.told is not None else None
        for stat in _STATS if found is not None else ():
            yield (stat,), getattr(found, stat)

    return read


def _phases(seen: SeenHost) -> Samples:
    for name, found in seen.told.seconds.items() if seen.told is not None else ():
        if name not in (STEP, ALONE):
            yield (name, "median"), found.median
            yield (name, "high"), found.high


def _components(seen: SeenHost) -> Samples:
    for name, found in seen.told.components.items() if seen.told is not None else ():
        yield (name,), found.high


def _findings(seen: SeenHost) -> Samples:
    for severity in SEVERITIES if seen.told is not None else ():
        yield (severity,), seen.told.findings.get(severity, 0) if seen.told is not None else None


def _slowest(seen: SeenHost) -> float | None:
    slow = seen.row.alone or seen.row.step_seconds
    return None if slow is None else slow.rank


FAMILIES: tuple[HostFamily, ...] = (
    HostFamily(
        name="llmtop_fleet_host_up",
        help="Whether a host answers: 1 or 0",
        read=_one(lambda seen: float(seen.row.status not in ("lost", "silent", "waiting", "absent", "left"))),
    ),
    HostFamily(
        name="llmtop_fleet_quiet_seconds",
        help="Since a host told anything",
        read=_one(lambda seen: seen.row.quiet_seconds),
    ),
    HostFamily(
        name="llmtop_fleet_clock_offset_seconds",
        help="How far a host's clock is ahead of the launching machine's",
        read=_one(lambda seen: seen.host.clock.offset_seconds if seen.host.clock is not None else None),
    ),
    HostFamily(
        name="llmtop_fleet_step",
        help="Newest step that all ranks of a host have finished",
        read=_told(lambda told: told.step),
    ),
    HostFamily(
        name="llmtop_fleet_behind_steps",
        help="Steps that the farthest host is ahead of it",
        read=_one(lambda seen: None if seen.told is None else seen.row.behind),
    ),
    HostFamily(name="llmtop_fleet_ranks", help="Of a host", read=_one(lambda seen: seen.row.ranks)),
    HostFamily(
        name="llmtop_fleet_ranks_alive",
        help="That run",
        read=_one(lambda seen: None if seen.told is None else seen.row.alive),
    ),
    HostFamily(
        name="llmtop_fleet_step_seconds",
        help="Over the ranks of a host",
        read=_spread(lambda told: told.seconds.get(STEP)),
        labels=("stat",),
    ),
    HostFamily(
        name="llmtop_fleet_alone_seconds",
        help="Loading and forward, in which ranks wait for no other below ZeRO-3",
        read=_spread(lambda told: told.seconds.get(ALONE)),
        labels=("stat",),
    ),
    HostFamily(
        name="llmtop_fleet_phase_seconds",
        help="Of a step, over the ranks of a host",
        read=_phases,
        labels=("phase", "stat"),
    ),
    HostFamily(
        name="llmtop_fleet_excess_ratio",
        help="How much longer a host's slowest rank takes alone than the usual host",
        read=_one(lambda seen: seen.row.excess),
    ),
    HostFamily(name="llmtop_fleet_slowest_rank", help="Number of a host's slowest rank", read=_one(_slowest)),
    HostFamily(
        name="llmtop_fleet_peak_memory_bytes",
        help="Peak of a step, over the ranks of a host",
        read=_spread(lambda told: told.peak_bytes),
        labels=("stat",),
    ),
    HostFamily(
        name="llmtop_fleet_memory_bytes",
        help="By component, of a host's rank that holds the most of it",
        read=_components,
        labels=("component",),
    ),
    *(
        HostFamily(
            name=f"llmtop_fleet_gpu_{figure}",
            help="NVML and GPM, over the GPUs of a host",
            read=_spread(lambda told, figure=figure: told.figures.get(figure)),  # type: ignore[misc]
            labels=("stat",),
        )
        for figure in (
            "utilization_percent",
            "tensor_active_percent",
            "memory_used_bytes",
            "power_watts",
            "temperature_celsius",
        )
    ),
    *(
        HostFamily(
            name=f"llmtop_fleet_{name}",
            help=words,
            read=_told(lambda told, field=field: getattr(told, field)),  # type: ignore[misc]
        )
        for name, field, words in (
            ("machine_memory_used_bytes", "memory_used_bytes", "Of the machine"),
            ("machine_memory_total_bytes", "memory_total_bytes", "Of the machine"),
            ("machine_cpu_percent", "cpu_percent", "Of the machine"),
            ("network_received_bytes_per_second", "receive_bytes_per_second", "All links together"),
            ("network_sent_bytes_per_second", "send_bytes_per_second", "All links together"),
            ("network_errors", "network_errors", "Damaged packets since the run began"),
            ("link_losses", "link_losses", "How often links went down since the run began"),
        )
    ),
    HostFamily(
        name="llmtop_fleet_links_down",
        help="Links that were up when the run began and are not now",
        read=_told(lambda told: len(told.links_down)),
    ),
    HostFamily(
        name="llmtop_fleet_findings",
        help="What stands out on a host",
        read=_findings,
        labels=("severity",),
    ),
)


def see_fleet(reader: FleetReader) -> SeenFleet:
    """What the hosts have told by now."""
    reader.poll()
    quiet, goes_on = reader.quiet_seconds(), reader.state.status not in ENDED
    found = fleet_findings(reader.fleet, reader.run.run_id, quiet, goes_on=goes_on)
    rows = host_rows(reader.fleet, found, quiet, goes_on=goes_on)
    hosts = zip(reader.fleet.hosts.values(), rows, strict=True)
    return SeenFleet(
        run_id=reader.run.run_id,
        state=reader.state,
        hosts=tuple(SeenHost(host=host, row=row) for host, row in hosts),
    )


def fleet_metrics(fleets: Iterable[SeenFleet]) -> Iterator[Metric]:
    """Every family, also where there is nothing to tell."""
    seen = tuple(fleets)
    for family in FAMILIES:
        metric = GaugeMetricFamily(family.name, family.help, labels=("run", "host", *family.labels))
        for fleet in seen:
            for one in fleet.hosts:
                for labels, value in family.read(one):
                    if value is not None:
                        metric.add_metric([fleet.run_id, one.host.name, *labels], float(value))
        yield metric
