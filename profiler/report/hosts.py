"""The hosts of a run in its report: a line for each, by its newest summary, and what stands out of them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.findings.finding import Finding, worst_first
from llmtop.profiler.fleet.findings import fleet_findings, gathered
from llmtop.profiler.fleet.overview import HostRow, host_rows
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.wrapping import hanging
from llmtop.profiler.units import counted, format_bytes, format_percent, format_range, format_seconds

_MOST_LINES = 16
"""Of more hosts the worst are told."""
HEADS = ("host", "ranks", "status", "step", "slowest step", "peak", "busy", "memory", "what stands out")


class HostsFound(Struct, frozen=True, kw_only=True):
    rows: tuple[HostRow, ...] = ()
    """In the order of their ranks; empty for a run on one machine."""
    findings: tuple[Finding, ...] = ()
    """The worst first."""


def hosts_found(run: RunDir, state: RunState, known: tuple[Finding, ...]) -> HostsFound:
    """`known` is what stands out in the run as a whole: hosts are not told to say the same."""
    try:
        hosts = read_hosts(run)
    except LlmtopError:
        hosts = None  # who watches its hosts is told so; the rest of the record is there
    if hosts is None:
        return HostsFound(findings=known)
    reader = FleetReader(run, hosts)
    reader.poll()
    quiet, goes_on = reader.quiet_seconds(), state.status not in ENDED
    found = fleet_findings(reader.fleet, state.called, quiet, goes_on=goes_on)
    rows = host_rows(reader.fleet, found, quiet, goes_on=goes_on)
    keys = {one.key for one in known} | {"clocks_differ"}
    more = tuple(one for one in gathered(found) if one.key not in keys)
    return HostsFound(rows=rows, findings=worst_first((*known, *more)))


def host_lines(rows: tuple[HostRow, ...], width: int) -> Iterator[str]:
    """Nothing for a run on one machine."""
    if not rows:
        return
    yield "Hosts"
    shown = _shown(rows)
    for row in shown:
        yield from hanging(row.name, _words(row), width)
    if len(shown) < len(rows):
        yield f"  and {counted(len(rows) - len(shown), 'more host')} of which less is to be said"


def host_cells(rows: tuple[HostRow, ...]) -> Iterator[tuple[str, ...]]:
    """As `HEADS` names them."""
    for row in _shown(rows):
        step, peak = row.step_seconds, row.peak_bytes
        yield (
            *(row.name, _ranks(row), row.status.replace("_", " "), f"{row.step:,}"),
            format_seconds(step.high if step is not None else None),
            format_bytes(peak.high if peak is not None else None),
            format_percent(row.busy_percent),
            format_percent(None if row.memory_share is None else 100 * row.memory_share),
            row.note,
        )


def _shown(rows: tuple[HostRow, ...]) -> tuple[HostRow, ...]:
    if len(rows) <= _MOST_LINES:
        return rows
    return tuple(sorted(rows, key=lambda row: row.worst_first)[:_MOST_LINES])


def _ranks(row: HostRow) -> str:
    return format_range(str(row.first_rank), str(row.first_rank + row.ranks - 1))


def _words(row: HostRow) -> str:
    step, peak = row.step_seconds, row.peak_bytes
    of = "rank" if row.ranks == 1 else "ranks"
    told = [f"{of} {_ranks(row)}: {row.status.replace('_', ' ')}"]
    told[0] += f" after step {row.step:,}" if row.step else ""
    if step is not None:
        told.append(f"a step of its slowest rank {format_seconds(step.high)}")
    if peak is not None:
        told.append(f"peak {format_bytes(peak.high)} on rank {peak.rank}")
    if row.busy_percent is not None:
        told.append(f"{format_percent(row.busy_percent)} busy")
    if row.memory_share is not None:
        told.append(f"{format_percent(100 * row.memory_share)} of its memory in use")
    return ", ".join(told) + (f"; {row.note}" if row.note else "")
