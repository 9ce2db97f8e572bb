"""What the runs of this machine do, as Prometheus and OpenMetrics read it. Needs prometheus-client.

Each scrape reads what the logs have gained and folds it, as the monitor does: nothing is sent by the ranks,
and without a scrape nothing is read. Every sample has the labels `run` and `host`; of a run over hosts each
machine tells what its own ranks do, and the launching one how all hosts are (`fleetmetrics.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import Breakdown, breakdown
from llmtop.profiler.findings.find import findings
from llmtop.profiler.findings.finding import SEVERITIES
from llmtop.profiler.fleet.part import HostPart
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.fold.modelname import model_name
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.mirrors.fleetmetrics import FAMILIES as FLEET_FAMILIES
from llmtop.profiler.mirrors.fleetmetrics import SeenFleet, fleet_metrics, see_fleet
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.hosts import HostDir, Hosts, read_hosts
from llmtop.profiler.record.rundir import RunDir, list_runs


class Seen(Struct, frozen=True, kw_only=True):
    """One run at one scrape."""

    host: str
    """By its name among the run's hosts; of a run on one machine as the machine calls itself."""
    state: RunState
    spec: RunSpec
    prediction: Prediction
    breakdown: Breakdown


Samples = Iterator[tuple[tuple[str, ...], float | None]]
"""Label values besides run and host, and the value; None: not known, so there is no sample."""
Read = Callable[[Seen], Samples]


class Family(Struct, frozen=True, kw_only=True):
    """One row of the table of metrics."""

    name: str
    help: str
    read: Read
    labels: tuple[str, ...] = ()
    counts: bool = False
    """A counter: its name gets `_total`."""


def _one(value: Callable[[Seen], float | None]) -> Read:
    def read(seen: Seen) -> Samples:
        yield (), value(seen)

    return read


def _device(name: str) -> Read:
    def read(seen: Seen) -> Samples:
        for device in seen.state.hardware.devices if seen.state.hardware else ():
            yield (str(device.index),), getattr(device, name)

    return read


def _series(column: str) -> Read:
    def read(seen: Seen) -> Samples:
        values = getattr(seen.state.speed_series, column)
        yield (), values[-1] if values else None

    return read


def _info(seen: Seen) -> Samples:
    state, spec = seen.state, seen.spec
    yield (spec.name, model_name(spec, state), spec.gpu.name, str(spec.world_size), state.status), 1.0


def _phases(seen: Seen) -> Samples:
    rank = seen.state.first
    for phase, seconds in (rank.phase_seconds if rank is not None else {}).items():
        yield (phase,), seconds


def _components(seen: Seen) -> Samples:
    for row in seen.breakdown.rows:
        yield (str(row.component), "predicted"), row.predicted_bytes
        yield (str(row.component), "measured"), row.actual_bytes


def _peaks(seen: Seen) -> Samples:
    yield ("predicted",), seen.breakdown.predicted_peak_bytes
    yield ("measured",), seen.breakdown.actual_peak_bytes


def _ranks(seen: Seen) -> Samples:
    for number, rank in sorted(seen.state.ranks.items()):
        yield (str(number),), seen.state.step_of(rank)


def _processes(seen: Seen) -> Samples:
    for process in seen.state.hardware.processes if seen.state.hardware else ():
        yield (str(process.rank),), process.rss_bytes


def _energy(seen: Seen) -> Samples:
    for index, joules in sorted(seen.state.energy.joules.items()):
        yield (str(index),), joules


def _findings(seen: Seen) -> Samples:
    found = [finding.severity for finding in findings(seen.state, seen.spec, seen.prediction)]
    for severity in SEVERITIES:
        yield (severity,), found.count(severity)


def _host_used(seen: Seen) -> float | None:
    return seen.state.hardware.host.memory_in_use_bytes if seen.state.hardware else None


def _host_cpu(seen: Seen) -> float | None:
    return seen.state.hardware.host.cpu_percent if seen.state.hardware else None


_NEWEST = "Of the newest step since it was launched or gone on with"
FAMILIES: tuple[Family, ...] = (
    Family(
        name="llmtop_run_info",
        help="A run: always 1",
        read=_info,
        labels=("name", "model", "gpu", "ranks", "status"),
    ),
    Family(
        name="llmtop_step",
        help="Newest step; that after which it goes on, until it has made one since it was gone on with",
        read=_one(lambda s: s.state.present_step),
    ),
    Family(name="llmtop_steps_planned", help="Steps asked for", read=_one(lambda s: s.spec.steps_planned)),
    Family(
        name="llmtop_skipped_steps",
        help="Steps without an update",
        read=_one(lambda s: s.state.skipped_steps),
    ),
    Family(
        name="llmtop_unsaved",
        help="1 while the newest checkpoint that was asked for could not be written",
        read=_one(lambda s: s.state.unsaved is not None),
    ),
    Family(name="llmtop_loss", help=_NEWEST, read=_one(lambda s: s.state.present_loss)),
    Family(name="llmtop_learning_rate", help=_NEWEST, read=_series("learning_rates")),
    Family(name="llmtop_grad_norm", help=_NEWEST, read=_series("grad_norms")),
    Family(name="llmtop_step_seconds", help=_NEWEST, read=_series("step_seconds")),
    Family(name="llmtop_tokens_per_second", help=_NEWEST, read=_series("tokens_per_second")),
    Family(
        name="llmtop_phase_seconds",
        help="Of rank 0's newest step that tells them",
        read=_phases,
        labels=("phase",),
    ),
    Family(
        name="llmtop_peak_memory_bytes",
        help="Peak of a step: of the rank that held the most, and predicted",
        read=_peaks,
        labels=("side",),
    ),
    Family(
        name="llmtop_memory_bytes",
        help="Memory by component at the peak",
        read=_components,
        labels=("component", "side"),
    ),
    Family(name="llmtop_rank_step", help="Newest step of each rank", read=_ranks, labels=("rank",)),
    Family(name="llmtop_rank_rss_bytes", help="Resident set of a rank", read=_processes, labels=("rank",)),
    *(
        Family(name=f"llmtop_device_{name}", help=words, read=_device(field), labels=("device",))
        for name, field, words in (
            ("memory_used_bytes", "memory_used_bytes", "NVML, the whole device"),
            ("memory_total_bytes", "memory_total_bytes", "NVML"),
            ("utilization_percent", "utilization_percent", "NVML"),
            ("sm_active_percent", "sm_active_percent", "GPM: SMs that had work"),
            ("tensor_active_percent", "tensor_active_percent", "GPM"),
            ("power_watts", "power_watts", "NVML"),
            ("temperature_celsius", "temperature_celsius", "NVML"),
            ("nvlink_sent_bytes_per_second", "nvlink_tx_bytes_per_second", "All links together"),
            ("nvlink_received_bytes_per_second", "nvlink_rx_bytes_per_second", "All links together"),
            ("pcie_sent_bytes_per_second", "pcie_tx_bytes_per_second", "To the host"),
            ("pcie_received_bytes_per_second", "pcie_rx_bytes_per_second", "From the host"),
            ("ecc_uncorrected", "ecc_uncorrected", "Since the driver was loaded"),
        )
    ),
    Family(
        name="llmtop_device_energy_joules",
        help="Drawn since the run began",
        read=_energy,
        labels=("device",),
        counts=True,
    ),
    Family(name="llmtop_host_memory_used_bytes", help="Of the machine", read=_one(_host_used)),
    Family(name="llmtop_host_cpu_percent", help="Of the machine", read=_one(_host_cpu)),
    Family(name="llmtop_hang_seconds", help="Without a step", read=_one(lambda s: s.state.hang_seconds)),
    Family(name="llmtop_findings", help="What stands out now", read=_findings, labels=("severity",)),
)


class _HerePart(HostPart):
    """The part of this machine: who supervises it is the host's own supervisor."""

    @property
    def supervisor_pid_path(self) -> Path:
        return self.own_path / "supervisor.pid"


class RunsCollector(Collector):
    """The runs that go on under `root`; those that were there once stay until they have ended."""

    def __init__(self, root: Path, only: RunDir | None = None) -> None:
        """`only`: this run alone, also after its end."""
        self._root, self._only = root, only
        self._readers: dict[tuple[Path, str], RunReader] = {}
        """By the run's folder and its host; of a run on one machine the name is empty."""
        self._fleet_readers: dict[Path, FleetReader] = {}
        self._lock = threading.Lock()
        """Two may scrape at once, and a reader is no thing of two threads."""

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            runs = tuple(self._runs())
            fleets = tuple(self._fleets())
        for family in FAMILIES:
            metric = _metric(family)
            for seen in runs:
                for labels, value in family.read(seen):
                    if value is not None:
                        metric.add_metric([seen.state.run_id, seen.host, *labels], float(value))
            yield metric
        yield from fleet_metrics(fleets)

    def _runs(self) -> Iterator[Seen]:
        chosen = [self._only] if self._only is not None else list_runs(self._root)
        for run, name in (part for whole in chosen for part in self._parts(whole)):
            key = run.path, name
            if self._only is None and key not in self._readers and not run.supervisor_alive():
                continue  # the record of an ended run may be long, and nobody asks for it
            seen = self._read(run, name)
            if seen is None:
                continue
            if self._only is None and seen.state.status in ENDED:
                del self._readers[key]
            else:
                yield seen

    def _parts(self, run: RunDir) -> Iterator[tuple[RunDir, str]]:
        """A run on one machine whole; of one over hosts the part of each host that is this machine."""
        hosts = self._hosts(run)
        if hosts is None:
            yield run, ""
            return
        for host in hosts.hosts:
            # Whether it is here its own supervisor's process says; the part is read with what the lead wrote.
            if (run.path, host.name) in self._readers or HostDir(run.path, host).supervisor_alive():
                yield _HerePart(run, host), host.name

    def _hosts(self, run: RunDir) -> Hosts | None:
        try:
            return read_hosts(run)
        except LlmtopError:
            return None  # it is read as a whole, which says what is wrong with it

    def _fleets(self) -> Iterator[SeenFleet]:
        """Runs over hosts that were launched here."""
        chosen = [self._only] if self._only is not None else list_runs(self._root)
        for run in chosen:
            known = self._fleet_readers.get(run.path)
            if known is None:
                hosts = self._hosts(run)
                if hosts is None or (self._only is None and not run.supervisor_alive()):
                    continue
                known = self._fleet_readers[run.path] = FleetReader(run, hosts)
            try:
                seen = see_fleet(known)
            except LlmtopError:
                continue
            if self._only is None and seen.state.status in ENDED:
                del self._fleet_readers[run.path]
            else:
                yield seen

    def _read(self, run: RunDir, name: str) -> Seen | None:
        """None for a run that is not readable: `llmtop ls` says why, and the others are told."""
        reader = self._readers.get((run.path, name))
        if reader is None:
            reader = self._readers[run.path, name] = RunReader(run)
        run = reader.run  # that one has its documents read already
        try:
            state = reader.poll()
            spec, prediction = run.spec(state.changes.setting), run.prediction(state.changes.setting)
        except LlmtopError:
            return None
        return Seen(
            host=name or state.host,
            state=state,
            spec=spec,
            prediction=prediction,
            breakdown=breakdown(state, spec, prediction),
        )


def _metric(family: Family) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if family.counts else GaugeMetricFamily
    return kind(family.name, family.help, labels=("run", "host", *family.labels))


def registry(root: Path, only: RunDir | None = None) -> CollectorRegistry:
    """What an exporter is given."""
    made = CollectorRegistry(auto_describe=False)
    made.register(RunsCollector(root, only))
    return made


def label_names() -> Mapping[str, tuple[str, ...]]:
    """Metric to its labels, for whoever writes a dashboard."""
    of_ranks = {family.name + ("_total" if family.counts else ""): family.labels for family in FAMILIES}
    of_hosts = {family.name: family.labels for family in FLEET_FAMILIES}
    return {name: ("run", "host", *labels) for name, labels in {**of_ranks, **of_hosts}.items()}
