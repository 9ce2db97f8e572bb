"""Findings about the processors of the host: other work on them, or a limit that holds the ranks back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from llmtop.profiler.findings.finding import STEADY_STEPS, Finding, Rule, Seen, Severity
from llmtop.profiler.findings.pace import STEADY_SAMPLES
from llmtop.profiler.fold.othersuse import others_share
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.fold.series import warm
from llmtop.profiler.record.deviceevents import HostSample, OtherWork, ProcessSample
from llmtop.profiler.record.events import HardwareSampled
from llmtop.profiler.units import counted, format_percent, format_seconds

NEWEST_SAMPLES = 60
"""A minute as samples are taken by default: what others did before that slows no step now."""
OTHERS_SHARE, OTHERS_WARNING_SHARE = 15.0, 30.0
"""Of all processors, in percent: less is a machine's own housekeeping."""
FULL_PERCENT = 90.0
"""Of the machine: others who leave processors idle slow nobody."""
WAIT_SHARE = 0.10
"""Of the time in which the ranks' threads could have run: without others, waiting is a few percent."""
THROTTLED_PERCENT, THROTTLED_WARNING_PERCENT = 10.0, 25.0
"""Of the periods of a limit."""
_MOST_NAMED, _NAME_CHARACTERS = 3, 15
SLOWER = 1.1
"""A step beside others' work that takes so many times one without is worth telling."""


def others_on_the_processors(seen: Seen) -> Iterator[Finding]:
    """Other programs take processors that the ranks wait for.

    A low priority of theirs costs the ranks nothing: the kernel's own count of waiting threads decides, and
    where a record has none a full machine on which the ranks train does.
    """
    samples = _steady(seen)
    shares = [share for share in map(others_share, samples) if share is not None]
    if len(shares) < STEADY_SAMPLES or median(shares) < OTHERS_SHARE:
        return
    waiting = _waiting(samples)
    busy = median(sample.host.cpu_percent or 0.0 for sample in samples)
    if waiting is None and (busy < FULL_PERCENT or not seen.spec.on_cpu):
        return
    if waiting is not None and waiting < WAIT_SHARE:
        return
    share = median(shares)
    host = samples[-1].host
    cores = host.cpu_count or 0
    goes_on = seen.state.status not in ENDED
    who = work_words(host, with_pids=goes_on)
    told = [
        f"they take {share * cores / 100:.1f} of {counted(cores, 'processor')}{f' ({who})' if who else ''}"
    ]
    if waiting is not None:
        told.append(
            f"the ranks' threads wait {format_percent(100 * waiting, digits=0)} of their time for one"
        )
    told += _slower(seen)
    severity: Severity = "warning" if share >= OTHERS_WARNING_SHARE else "info"
    yield Finding(
        key="other_work",
        severity=severity,
        title="other programs take processors",
        evidence="; ".join(told),
        change="end them, run them elsewhere, or let them give way"
        + (f": {_renice(host)}" if goes_on else ""),
    )


def held_by_a_limit(seen: Seen) -> Iterator[Finding]:
    """The ranks use up what a container or a job of a scheduler may have of the processors."""
    samples = _steady(seen)
    known = [s.host.cpu_throttled_percent for s in samples if s.host.cpu_throttled_percent is not None]
    if len(known) < STEADY_SAMPLES or median(known) < THROTTLED_PERCENT:
        return
    throttled, host = median(known), samples[-1].host
    cores = f"{host.cpu_limit_cores:g}" if host.cpu_limit_cores is not None else "n/a"
    of = f" of the machine's {host.cpu_count}" if host.cpu_count else ""
    severity: Severity = "warning" if throttled >= THROTTLED_WARNING_PERCENT else "info"
    yield Finding(
        key="processor_limit",
        severity=severity,
        title="a limit on processors holds it back",
        evidence=f"the cgroup may use {cores} processors{of}, and had used them up before the end of"
        f" {format_percent(throttled, digits=0)} of the periods: all its threads stood still then",
        change="raise the limit (docker --cpus, Slurm --cpus-per-task, a pod's limits.cpu), or start fewer"
        " threads: --set threads_per_rank=N",
    )


def _steady(seen: Seen) -> Sequence[HardwareSampled]:
    """Samples taken while steps were made, after the first ones; the newest while the run goes on."""
    series = seen.state.speed_series
    times = [series.times[at] for at in warm(series, WARMUP_STEPS)]
    if not times:
        return ()
    shown = [s for s in seen.state.hardware_history if times[0] < s.t <= times[-1]]
    # Of a run that has ended it counts what was so for most of the time that is kept.
    return shown if seen.state.status in ENDED else shown[-NEWEST_SAMPLES:]


def _waiting(samples: Sequence[HardwareSampled]) -> float | None:
    """Of the rank that waits most: its share of the time in which its threads could have run."""
    shares: dict[int, list[float]] = {}
    for sample in samples:
        for process in sample.processes:
            share = _wait_share(process)
            if share is not None:
                shares.setdefault(process.rank, []).append(share)
    return max((median(each) for each in shares.values() if len(each) >= STEADY_SAMPLES), default=None)


def _wait_share(process: ProcessSample) -> float | None:
    used, waited = process.cpu_percent, process.cpu_wait_percent
    if used is None or waited is None or used + waited <= 0:
        return None
    return waited / (used + waited)


def work_words(host: HostSample, *, with_pids: bool = False) -> str:
    """The busiest programs beside the run, each with the processors it takes; empty where none stands out.

    `with_pids`: of the busiest processes of each, with whose they are; `...` where there are more. A damaged
    record may hold more and longer ones than a sampler writes.
    """
    return ", ".join(
        f"{work.name[:_NAME_CHARACTERS]}{f' x{work.processes}' if work.processes > 1 else ''}"
        f" {work.cpu_percent / 100:.1f}{_pid_words(work) if with_pids else ''}"
        for work in host.other_work[:_MOST_NAMED]
    )


def _pid_words(work: OtherWork) -> str:
    if not work.pids:
        return ""
    more = " ..." if work.processes > len(work.pids[:_MOST_NAMED]) else ""
    users = ", ".join(user[:_NAME_CHARACTERS] for user in work.users[:_MOST_NAMED])
    pids = " ".join(map(str, work.pids[:_MOST_NAMED]))
    return f", pid {pids}{more}" + (f" of {users}" if users else "")


def _renice(host: HostSample) -> str:
    """For the busiest processes of the busiest program; of a record that names none, for any."""
    pids = next((work.pids[:_MOST_NAMED] for work in host.other_work if work.pids), ())
    return f"renice 19 -p {' '.join(map(str, pids)) or 'PID'}"


def _slower(seen: Seen) -> list[str]:
    """Steps while the others work, and while they do not, where the record has both."""
    alone, beside = _steps_by_load(seen)
    if len(alone) < STEADY_STEPS or len(beside) < STEADY_STEPS:
        return []
    without, with_them = median(alone), median(beside)
    if with_them < SLOWER * without:
        return []
    return [f"a step takes {format_seconds(with_them)} beside them, {format_seconds(without)} without"]


def _steps_by_load(seen: Seen) -> tuple[list[float], list[float]]:
    """Seconds of the steps in which others used next to nothing, and in which they used much."""
    series, alone, beside = seen.state.speed_series, [], []
    loads = [(s.t, share) for s in seen.state.hardware_history if (share := others_share(s)) is not None]
    at = 0
    for point in warm(series, WARMUP_STEPS):
        while at < len(loads) and loads[at][0] < series.times[point]:
            at += 1
        if at == len(loads):
            break
        seconds = series.step_seconds[point]
        if series.profiled[point] or seconds <= 0:
            continue
        share = loads[at][1]  # of the sample that a step ended before: it tells of the time up to then
        if share < OTHERS_SHARE / 3:
            alone.append(seconds)
        elif share >= OTHERS_SHARE:
            beside.append(seconds)
    return alone, beside


PROCESSOR_RULES: tuple[Rule, ...] = (others_on_the_processors, held_by_a_limit)
