"""Findings about speed: what keeps a step from being shorter."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from llmtop.profiler.findings.finding import STEADY_STEPS, Finding, Rule, Seen, Severity
from llmtop.profiler.runstate import RankState
from llmtop.profiler.units import format_percent, format_seconds

INPUT_SHARE, INPUT_WARNING_SHARE = 0.10, 0.25
STRAGGLER_SHARE = 0.25
STRAGGLER_STEPS = 10
STRAGGLER_FLOOR_SECONDS = 0.01
THROTTLED_SHARE = 0.10
HARD_THROTTLES = ("thermal", "slowdown", "brake")
"""Words in a throttle reason that mean heat or a fault, not a power limit doing its work."""


def input_bound(seen: Seen) -> Iterator[Finding]:
    rank = seen.state.ranks.get(0)
    times = _mean_phases(rank) if rank else {}
    step = sum(times.values())
    if "data" not in times or step <= 0 or times["data"] < INPUT_SHARE * step:
        return
    share = times["data"] / step
    yield Finding(
        key="input_bound",
        severity="warning" if share >= INPUT_WARNING_SHARE else "info",
        title="the step waits for data",
        evidence=f"loading takes {format_seconds(times['data'])} of {format_seconds(step)} a step "
        f"({format_percent(100 * share)})",
        change="put the data on a faster disk, or save it packed once and train on that folder (--data)",
    )


def straggler(seen: Seen) -> Iterator[Finding]:
    """Collectives make every rank wait for the slowest, so the wait hides in backward and optimizer.

    What a rank does alone, loading and its forward pass, shows who is slow.
    """
    alone: dict[int, float] = {}
    for number, rank in seen.state.ranks.items():
        times = _mean_phases(rank, STRAGGLER_STEPS)
        if "forward" in times:
            alone[number] = times["forward"] + times.get("data", 0.0)
    if len(alone) < 2:
        return
    slowest = max(alone, key=lambda number: alone[number])
    usual = median(seconds for number, seconds in alone.items() if number != slowest)
    excess = alone[slowest] - usual
    if excess < STRAGGLER_FLOOR_SECONDS or excess < STRAGGLER_SHARE * usual:
        return
    yield Finding(
        key="straggler",
        severity="warning",
        title=f"all ranks wait for rank {slowest}",
        evidence=(
            f"loading and forward take it {format_seconds(alone[slowest])}, "
            f"the others {format_seconds(usual)}"
        ),
        change="look for other work, heat or a lower clock on its device and its cores",
    )


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


def _mean_phases(rank: RankState, steps: int = STEADY_STEPS) -> dict[str, float]:
    return {
        phase: total.seconds / total.steps
        for phase, total in rank.phase_totals.items()
        if total.steps >= steps
    }


SPEED_RULES: tuple[Rule, ...] = (compiling, straggler, input_bound, throttled)
