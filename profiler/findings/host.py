"""Findings about the host: memory that runs out before the run does."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from llmtop.profiler.findings.finding import Finding, Rule, Seen
from llmtop.profiler.findings.memory import host_relief
from llmtop.profiler.findings.pace import step_seconds
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.forecast import SETTLE_STEPS, Forecast, forecast
from llmtop.profiler.units import format_bytes, format_range, format_seconds

PLENTY_SHARE, PLENTY_SECONDS = 0.25, 600.0
"""Less of a limit than this in use is plenty left, unless it is full so soon: a line from so far below hits
it by chance."""
UNKNOWN_END_SECONDS = 3600.0
"""Where the time to the run's end is not known, an hour ahead is looked at."""


def growth(state: RunState) -> Forecast | None:
    """How host memory goes on, judged by the samples after the first steps of the newest start.

    None while ranks start, anew as well: building a model fills memory as it should.
    """
    stages = [stage for rank in state.ranks.values() for stage in rank.stages]
    if state.status == "starting" or any(stage.seconds is None for stage in stages):
        return None
    began = max((stage.began for stage in stages), default=None)
    series = state.series
    seen = [(n, t) for n, t in zip(series.steps, series.times, strict=True) if began is None or t > began]
    settled = next((t for n, t in seen if n >= seen[0][0] + SETTLE_STEPS), None)
    told = forecast(state.hardware_history, settled)
    if told is None or told.seconds is None or told.seconds <= PLENTY_SECONDS:
        return told
    if told.used_bytes >= PLENTY_SHARE * told.limit_bytes:
        return told
    return replace(told, seconds=None, earliest_seconds=None, latest_seconds=None)


def memory_runs_out(seen: Seen) -> Iterator[Finding]:
    """Only where the limit is met before the run ends, with the error of the slope on the careful side."""
    state = seen.state
    if state.status in ENDED:
        return
    told = growth(state)
    if told is None or told.seconds is None:
        return
    seconds = step_seconds(seen)
    planned = seen.spec.steps_planned
    ends_in = UNKNOWN_END_SECONDS
    if seconds is not None and planned is not None:
        ends_in = max(0, planned - state.steps_finished) * seconds
    if told.seconds > ends_in:
        return
    between = format_range(format_seconds(told.earliest_seconds), format_seconds(told.latest_seconds))
    used, limit = format_bytes(told.used_bytes), format_bytes(told.limit_bytes)
    saving = _saving_words(state)
    yield Finding(
        key="host_memory_grows",
        severity="warning",
        title=f"host memory full in {format_seconds(told.seconds)}",
        evidence=f"{used} of {limit} ({told.limit}), growing by {format_bytes(told.slope.per_second * 60)} a "
        f"minute: full in {between}, and the run goes on for {format_seconds(ends_in)}{saving}",
        change=f"{host_relief(seen)}; or stop with a checkpoint before it is full",
        command=f"llmtop stop {state.called} --save",
    )


def _saving_words(state: RunState) -> str:
    """What the supervisor has done about it."""
    told = state.memory_runs_out
    if told is None or told.action == "warned":
        return ""
    if told.action == "no_room":
        return f"; no checkpoint was asked for: {told.reason}"
    since = [saved for saved in state.checkpoints if saved.t >= told.t]
    left = format_seconds(told.seconds)
    if not since:
        return f"; a checkpoint was asked for when {left} were left"
    return f"; a checkpoint was made of step {since[0].step:,}, when {left} were left"


def ended_as_memory_filled(seen: Seen) -> Iterator[Finding]:
    """Of a run that failed after host memory was forecast to be full: what was saved before."""
    state, told = seen.state, seen.state.memory_runs_out
    if told is None or state.status not in ("failed", "out_of_memory", "lost"):
        return
    used, limit = format_bytes(told.used_bytes), format_bytes(told.limit_bytes)
    yield Finding(
        key="host_memory_grew",
        severity="warning",
        title="host memory was filling up when the run ended",
        evidence=f"{used} of {limit} ({told.limit}), growing by {format_bytes(told.bytes_per_second * 60)} a"
        f" minute: full in {format_seconds(told.seconds)} from then{_saving_words(state)}",
        change=host_relief(seen),
    )


HOST_RULES: tuple[Rule, ...] = (memory_runs_out, ended_as_memory_filled)
