"""What the screens of hosts show, as immutable values: made in a thread from what `FleetReader` has read."""

from __future__ import annotations

from statistics import median

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.fleet.findings import HostFinding, fleet_findings
from llmtop.profiler.fleet.fleetstate import FleetState
from llmtop.profiler.fleet.overview import HostRow, HostStatus, host_rows
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.fold.runstate import ENDED, RunState, Status
from llmtop.profiler.record.remote import Remote, name_here, read_remote

HOST_MARKS: dict[HostStatus, tuple[str, str, str]] = {
    "lost": ("✗", "no answer", "error"),
    "absent": ("✗", "not there", "error"),
    "failed": ("✗", "failed", "error"),
    "out_of_memory": ("✗", "OOM", "error"),
    "silent": ("?", "silent", "warning"),
    "waiting": ("◌", "waiting", "accent"),
    "starting": ("◌", "starting", "accent"),
    "stopping": ("◐", "stopping", "warning"),
    "running": ("●", "running", "success"),
    "completed": ("✓", "done", "success"),
    "stopped": ("■", "stopped", "warning"),
    "left": ("■", "left", "warning"),
    "gone": ("?", "gone", "warning"),
}
"""Status to its mark, its word, and the colour of the theme that goes with it; the worst first."""


class FleetView(Struct, frozen=True, kw_only=True):
    """Everything that the overview knows at one time."""

    run_id: str
    short_id: str
    """What commands take for the run, among those that there were when it was opened."""
    spec: RunSpec
    state: RunState
    """As the lead says: of the run as a whole, without any rank."""
    fleet: FleetState
    rows: tuple[HostRow, ...]
    """In the order of their ranks."""
    findings: tuple[HostFinding, ...]
    remote: Remote | None = None
    """Of a run on another machine: how the connection to it is."""

    @property
    def going_on(self) -> bool:
        return self.state.status not in ENDED

    @property
    def status(self) -> Status:
        """The lead's, and running as soon as a host has made a step."""
        if self.state.status == "starting" and any(row.step for row in self.rows):
            return "running"
        return self.state.status

    @property
    def answering(self) -> int:
        return sum(row.status not in ("lost", "silent", "waiting", "absent") for row in self.rows)

    @property
    def steps(self) -> tuple[int, int]:
        """The lowest and the highest newest step of the hosts that have told any."""
        known = [row.step for row in self.rows if row.status not in ("waiting", "absent")]
        return (min(known), max(known)) if known else (0, 0)

    @property
    def loss(self) -> float | None:
        first = next(iter(self.fleet.hosts.values()), None)
        return first.summary.loss if first is not None and first.summary is not None else None

    @property
    def tokens_per_second(self) -> float | None:
        """By the usual host's steps: all make the same ones."""
        told = (host.summary.tokens_per_second for host in self.fleet.hosts.values() if host.summary)
        known = [rate for rate in told if rate is not None]
        return median(known) if known else None


def fleet_view(reader: FleetReader, spec: RunSpec, short_id: str = "") -> FleetView:
    """What the reader has read by now. `short_id`: by default the whole id."""
    fleet, state, quiet = reader.fleet, reader.state, reader.quiet_seconds()
    goes_on = state.status not in ENDED
    found = fleet_findings(fleet, name_here(reader.run.path), quiet, goes_on=goes_on)
    return FleetView(
        run_id=reader.run.run_id,
        short_id=short_id or reader.run.run_id,
        spec=spec,
        state=state,
        fleet=fleet,
        rows=host_rows(fleet, found, quiet, goes_on=goes_on),
        findings=found,
        remote=read_remote(reader.run.path),
    )
