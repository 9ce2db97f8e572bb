"""Findings about speed: what keeps a step from being shorter."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from llmtop.profiler.findings.finding import STEADY_STEPS, Finding, Rule, Seen, Severity
from llmtop.profiler.findings.pace import mean_phases
from llmtop.profiler.fold.pace import Pace
from llmtop.profiler.localrank import local_index
from llmtop.profiler.record.stepevents import BETWEEN
from llmtop.profiler.units import format_percent, format_seconds

INPUT_SHARE, INPUT_WARNING_SHARE = 0.10, 0.25
"""Of a step: a loader that keeps up takes none of it; a quarter is a third more time for the same work."""
STRAGGLER_SHARE = 0.25
STRAGGLER_STEPS = 10
STRAGGLER_FLOOR_SECONDS = 0.01
"""A shorter wait is as likely the clock's."""
SLOW_CLOCK_SHARE = 0.9
THROTTLED_SHARE = 0.10
HARD_THROTTLES = ("thermal", "slowdown", "brake")
"""Words in a throttle reason that mean heat or a fault, not a power limit doing its work."""


def input_bound(seen: Seen) -> Iterator[Finding]:
    """Of a script only what torch's data loaders take is known to be loading."""
    times = mean_phases(seen.state.first)
    step, script = sum(times.values()), seen.spec.script is not None
    loading = times.get("data", 0.0)
    is_known = BETWEEN in times or not script
    if not is_known or step <= 0 or loading < INPUT_SHARE * step:
        return
    share = loading / step
    yield Finding(
        key="input_bound",
        severity=_severity(share),
        title="the step waits for data",
        evidence=f"loading takes {format_seconds(loading)} of {format_seconds(step)} a step "
        f"({format_percent(100 * share)})",
        change="more num_workers of its DataLoader, with persistent_workers; or prepare the data once, on a"
        " faster disk"
        if script
        else "put the data on a faster disk, or save it packed once and train on that folder (--data)",
    )


def between_steps(seen: Seen) -> Iterator[Finding]:
    """Of a loop that is not ours only the calls of the engine and of torch's data loaders are seen, and not
    what it does between them."""
    times = mean_phases(seen.state.first)
    step, is_told = sum(times.values()), BETWEEN in times
    outside = times.get(BETWEEN, times.get("data", 0.0))
    if seen.spec.script is None or step <= 0 or outside < INPUT_SHARE * step:
        return
    beside = "forward, backward, optimizer and data loaders" if is_told else "forward, backward and optimizer"
    others = "evaluation, logging or saving" if is_told else "data loading, evaluation, logging or saving"
    yield Finding(
        key="between_steps",
        severity=_severity(outside / step),
        title="the script is busy between its steps",
        evidence=f"outside {beside}: {format_seconds(outside)} of {format_seconds(step)} a step"
        f" ({format_percent(100 * outside / step)}); {others}, which are not told apart",
        change=f"{seen.state.command('stacks')} shows where its ranks stand meanwhile",
    )


def _severity(share: float) -> Severity:
    return "warning" if share >= INPUT_WARNING_SHARE else "info"


def straggler(seen: Seen) -> Iterator[Finding]:
    """Collectives make every rank wait for the slowest, so the wait hides in backward and optimizer.

    What a rank does alone, loading and its forward pass, shows who is slow, and since when. ZeRO-3 gathers in
    forward, which hides it there too.
    """
    paces = {n: r.alone for n, r in sorted(seen.state.ranks.items()) if r.alone.steps >= STRAGGLER_STEPS}
    if len(paces) < 2:
        return
    # A rank that is a step ahead may have just begun to keep larger buckets.
    stride = max(pace.stride for pace in paces.values())
    paces = {number: pace.coarser(stride) for number, pace in paces.items()}
    begin = min(pace.first_bucket for pace in paces.values())
    end = min(pace.end_bucket for pace in paces.values())
    at = _stretch(paces, begin, end)
    newest = None if at is None else _excess(paces, at, end)
    if at is None or newest is None:
        return
    while (before := _stretch(paces, begin, at)) is not None:
        if not _is_slow(newest.rank, paces, before, at):
            break
        at = before
    at = _edge(newest.rank, paces, begin, at, end)
    rank = newest.rank
    alone = "loading and forward take it" if seen.spec.script is None else "up to the end of forward it takes"
    is_old = all(not pace.count(begin, at) for pace in paces.values())
    since = "since the first steps" if is_old else f"since about step {paces[rank].began(at)}"
    yield Finding(
        key="straggler",
        severity="warning",
        title=f"all ranks wait for rank {rank}",
        evidence=f"{alone} {format_seconds(newest.seconds)}, the others "
        f"{format_seconds(newest.usual)}: {format_seconds(newest.seconds - newest.usual)} a step, {since}"
        + _beside(seen, rank),
        change="look for other work, heat or a lower clock on its device and its cores",
    )


class _Excess(NamedTuple):
    """The slowest rank of a stretch of steps, far enough behind the others."""

    rank: int
    seconds: float
    usual: float


def _stretch(paces: dict[int, Pace], begin: int, end: int) -> int | None:
    """The last bucket from which up to `end` every rank tells so many steps that one odd one does not decide;
    None where there are not so many."""
    for first in range(end - 1, begin - 1, -1):
        if all(pace.count(first, end) >= STRAGGLER_STEPS for pace in paces.values()):
            return first
    return None


def _edge(rank: int, paces: dict[int, Pace], begin: int, at: int, end: int) -> int:
    """The bucket in which it began: a stretch may begin before that, or after it."""
    while at > begin and _is_slow(rank, paces, at - 1, at) is not False:
        at -= 1
    while at < end - 1 and not _is_slow(rank, paces, at, at + 1):
        at += 1
    return at


def _is_slow(rank: int, paces: dict[int, Pace], first: int, end: int) -> bool | None:
    """Whether all wait for it in these buckets; None where not every rank tells of them."""
    if not all(pace.count(first, end) for pace in paces.values()):
        return None
    excess = _excess(paces, first, end)
    return excess is not None and excess.rank == rank


def _excess(paces: dict[int, Pace], first: int, end: int) -> _Excess | None:
    """Over the buckets from `first` up to `end`, of which every rank tells."""
    means = {number: pace.mean(first, end) for number, pace in paces.items()}
    alone = {number: seconds for number, seconds in means.items() if seconds is not None}
    slowest = max(alone, key=lambda number: alone[number])
    usual = median(seconds for number, seconds in alone.items() if number != slowest)
    excess = alone[slowest] - usual
    if excess < STRAGGLER_FLOOR_SECONDS or excess < STRAGGLER_SHARE * usual:
        return None
    return _Excess(slowest, alone[slowest], usual)


def _beside(seen: Seen, rank: int) -> str:
    """What its device shows that the others do not: a lower clock, or what holds it down."""
    devices = seen.state.hardware.devices if seen.state.hardware else ()
    local = local_index(seen.spec, seen.state.ranks_here, rank)
    if local is None or local >= len(devices) or len(devices) < 2:
        return ""
    own = devices[local]
    others = [d.sm_clock_hz for at, d in enumerate(devices) if at != local and d.sm_clock_hz]
    words = ""
    if own.sm_clock_hz and others and own.sm_clock_hz < SLOW_CLOCK_SHARE * median(others):
        words = f"; its GPU runs at {own.sm_clock_hz / 1e6:.0f} MHz, the others at {median(others) / 1e6:.0f}"
    if own.throttle_reasons:
        words += f"; held down by {', '.join(own.throttle_reasons)}"
    return words


def throttled(seen: Seen) -> Iterator[Finding]:
    samples = seen.state.hardware_samples
    for index, reasons in sorted(seen.state.throttled_samples.items()):
        frequent = {name: count for name, count in reasons.items() if count > THROTTLED_SHARE * samples}
        if samples < STEADY_STEPS or not frequent:
            continue
        hard = [name for name in frequent if any(word in name for word in HARD_THROTTLES)]
        severity: Severity = "warning" if hard else "info"
        named = ", ".join(f"{name} in {format_percent(100 * n / samples)}" for name, n in frequent.items())
        yield Finding(
            key="throttled",
            severity=severity,
            title=f"GPU {index} runs below its full clock",
            evidence=f"{named} of {samples} samples",
            change="check cooling and power supply of the machine"
            if hard
            else "its power limit holds it back; nvidia-smi -pl raises the limit where the maker allows it",
        )


def compiling(seen: Seen) -> Iterator[Finding]:
    if seen.state.compiling is not None:
        yield Finding(
            key="compiling",
            severity="info",
            title=f"{seen.state.compiling} is being compiled",
            evidence="compiler processes run below the ranks; this takes minutes, once per environment",
            change="wait; the next run finds it built",
        )


SPEED_RULES: tuple[Rule, ...] = (compiling, straggler, input_bound, between_steps, throttled)
