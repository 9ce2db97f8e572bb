"""From the state of a host's ranks to its summary. Pure; the cost follows from the number of ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import process_peaks
from llmtop.profiler.findings.finding import Finding, first_line
from llmtop.profiler.fleet.summary import (
    ALONE,
    MOST_FAILED,
    MOST_WORST,
    STEP,
    FailedRank,
    HostSummarised,
    Spread,
    Worst,
    shortened,
    spread,
)
from llmtop.profiler.fold.rankstate import PhaseTotal, RankState
from llmtop.profiler.fold.runstate import ENDED, RunState, Status
from llmtop.profiler.record.deviceevents import HostSample
from llmtop.profiler.record.events import HardwareSampled
from llmtop.profiler.record.stepevents import BEFORE_FORWARD

FIGURES = (
    "utilization_percent",
    "sm_active_percent",
    "tensor_active_percent",
    "memory_used_bytes",
    "power_watts",
    "temperature_celsius",
)
"""Readings of a GPU that are told of a host."""


def summarise(
    host: str,
    state: RunState,
    spec: RunSpec,
    found: Sequence[Finding],
    before: RunState | None = None,
) -> HostSummarised:
    """`state` is that of the host's ranks alone, `found` its findings.

    Times are those of the steps since `before`, another state of the same host, or of all steps without one.
    """
    ranks = state.ranks
    sample = state.hardware if state.hardware is not None else HardwareSampled()
    steps = [state.step_of(rank) for rank in _all(state)]
    first = state.first.last_step if state.first is not None else None
    return HostSummarised(
        host=host,
        status=_status(state),
        first_rank=state.first_rank,
        ranks=len(state.ranks_here),
        alive=sum(rank.pid is not None and rank.exited is None for rank in ranks.values()),
        setting=state.changes.setting,
        step=min(steps, default=0),
        ahead_step=max(steps, default=0),
        loss=first.loss if first is not None and state.first_rank == 0 else None,
        tokens_per_second=_rate(first.tokens, first.step_seconds) if first is not None else None,
        seconds=step_seconds(state, before),
        peak_bytes=spread(_peaks(state, spec)),
        components=_components(ranks),
        figures=_figures(state),
        hang_seconds=state.hang_seconds,
        devices_lost=tuple(sorted(state.lost_devices)),
        xids=sum(state.xid_counts.values()),
        findings=_counts(found),
        worst=tuple(Worst(one.severity, one.key, one.title) for one in found[:MOST_WORST]),
        failed=_failed(ranks),
        rss_bytes=spread({one.rank: one.rss_bytes for one in sample.processes}),
        memory_used_bytes=sample.host.memory_in_use_bytes,
        memory_total_bytes=sample.host.memory_total_bytes,
        cpu_percent=_short(sample.host.cpu_percent),
        receive_bytes_per_second=_short(sample.host.network_receive_bytes_per_second),
        send_bytes_per_second=_short(sample.host.network_send_bytes_per_second),
        network_errors=_since(state, lambda host: host.network_errors),
        link_losses=_since(state, lambda host: host.link_losses),
        links_down=sample.host.links_down,
    )


def _status(state: RunState) -> Status:
    """As the ranks of the host tell: how the run as a whole ends, the lead says."""
    ranks = [state.ranks.get(number) for number in state.ranks_here]
    ended = [rank for rank in ranks if rank is not None and rank.exited is not None]
    if state.status in ENDED or not ended or len(ended) < len(ranks):
        return state.status
    if any(rank.failed is not None and rank.failed.out_of_memory for rank in ended):
        return "out_of_memory"
    if any(rank.finished is None for rank in ended):
        return "failed"
    stopped = any(rank.finished is not None and rank.finished.reason == "stopped" for rank in ended)
    return "stopped" if stopped else "completed"


def step_seconds(state: RunState, before: RunState | None) -> dict[str, Spread]:
    """Mean of each part of a step by rank, over the steps since `before`."""
    then = before.ranks if before is not None else {}
    by_name: dict[str, dict[int, float | None]] = {}
    for number, rank in state.ranks.items():
        for name, seconds in _means(rank, then.get(number)).items():
            by_name.setdefault(name, {})[number] = seconds
    found = {name: spread(values) for name, values in by_name.items()}
    return {name: one for name, one in found.items() if one is not None}


def _means(rank: RankState, before: RankState | None) -> dict[str, float]:
    if before is not None and (before.pid, before.setting) != (rank.pid, rank.setting):
        before = None  # its totals began anew
    found: dict[str, float] = {}
    step = _mean(rank.step_total, before.step_total if before is not None else None)
    if step is not None:
        found[STEP] = step
    for phase, total in rank.phase_totals.items():
        mean = _mean(total, before.phase_totals.get(phase) if before is not None else None)
        if mean is not None:
            found[phase] = mean
    if "forward" in found:
        found[ALONE] = found["forward"] + sum(found.get(name, 0.0) for name in BEFORE_FORWARD)
    return found


def _mean(total: PhaseTotal, before: PhaseTotal | None) -> float | None:
    steps = total.steps - (before.steps if before is not None else 0)
    seconds = total.seconds - (before.seconds if before is not None else 0.0)
    return seconds / steps if steps > 0 else None


def _all(state: RunState) -> list[RankState]:
    """Also of ranks that have told nothing yet."""
    return [state.ranks.get(number) or RankState(rank=number) for number in state.ranks_here]


def _rate(tokens: int, seconds: float) -> float | None:
    return shortened(tokens / seconds) if tokens and seconds > 0 else None


def _peaks(state: RunState, spec: RunSpec) -> dict[int, float | None]:
    if spec.on_cpu:
        return dict(process_peaks(state, spec))
    return {
        number: max((p.peak_bytes for p in rank.peaks.values() if p.peak_bytes is not None), default=None)
        for number, rank in state.ranks.items()
    }


def _components(ranks: Mapping[int, RankState]) -> dict[str, Spread]:
    by_name: dict[str, dict[int, float | None]] = {}
    for number, rank in ranks.items():
        for name, size in _fullest(rank).items():
            by_name.setdefault(name, {})[number] = size
    found = {name: spread(values) for name, values in by_name.items()}
    return {name: one for name, one in found.items() if one is not None}


def _fullest(rank: RankState) -> Mapping[str, int]:
    """The components of the peak that held the most, or of the fullest moment where no peak was traced."""
    if rank.peaks_classified:
        return max(rank.peaks_classified.values(), key=lambda peak: peak.total_bytes).components
    held = [moment.components for moment in rank.classified.values()]
    return max(held, key=lambda components: sum(components.values()), default={})


def _figures(state: RunState) -> dict[str, Spread]:
    """The sampler's devices are in the order of the host's ranks."""
    devices = state.hardware.devices if state.hardware is not None else ()
    found = {
        name: spread({state.first_rank + at: getattr(one, name) for at, one in enumerate(devices)})
        for name in FIGURES
    }
    return {name: one for name, one in found.items() if one is not None}


def _counts(found: Sequence[Finding]) -> dict[str, int]:
    severities = [one.severity for one in found]
    return {severity: severities.count(severity) for severity in dict.fromkeys(severities)}


def _failed(ranks: Mapping[int, RankState]) -> tuple[FailedRank, ...]:
    told: list[FailedRank] = []
    for number, rank in sorted(ranks.items()):
        if rank.failed is not None:
            why = f"{rank.failed.error_type}: {first_line(rank.failed.message)}"
        elif rank.exited is not None and rank.finished is None and rank.exited.exit_code != 0:
            why = rank.exited.signal or f"exit code {rank.exited.exit_code}"
        else:
            continue
        told.append(FailedRank(number, why[:200]))
    return tuple(told[:MOST_FAILED])


def _since(state: RunState, count: Callable[[HostSample], int | None]) -> int | None:
    """How far a counter of the machine has gone since the run's first sample."""
    now = count(state.hardware.host) if state.hardware is not None else None
    then = count(state.first_host) if state.first_host is not None else None
    return None if now is None else max(0, now - (then or 0))


def _short(value: float | None) -> float | None:
    return None if value is None else shortened(value)
