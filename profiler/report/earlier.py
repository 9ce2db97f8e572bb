"""What stood out on an earlier setting of a run, for a good part of it, and is not to be seen at its end."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from llmtop.profiler.findings.find import findings
from llmtop.profiler.findings.finding import Finding, worst_first
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.feed import LateLine, RunStream
from llmtop.profiler.record.rundir import RunDir

GOOD_PART = 0.25
"""Of the steps: a setting that made fewer is not looked at again."""
_PASSING = frozenset({"hang", "host_memory_grows", "lost", "failed"})
"""Keys of what is of one moment alone, or of the end."""


def with_earlier(run: RunDir, state: RunState, found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """`found` is what stands out at the end. What stood out before says of which steps; what it would have
    changed then is told, and no command, for another setting is in force."""
    known = {one.key for one in found} | _PASSING
    more = []
    for first, last, setting in _long_ones(state):
        then = _state_at(run, state, last)
        if then is None:
            continue
        for one in findings(then, run.spec(setting), run.prediction(setting)):
            if one.key not in known:
                known.add(one.key)
                told = f"in steps {first:,} to {last:,}: {one.evidence}"
                severity = "warning" if one.severity == "critical" else one.severity
                more.append(replace(one, severity=severity, evidence=told, command=""))
    return worst_first((*found, *more)) if more else found


def _long_ones(state: RunState) -> Iterator[tuple[int, int, int]]:
    """First and last step and number of each earlier setting that made a good part of the steps."""
    spans = state.changes.spans
    for span, after in zip(spans, spans[1:], strict=False):
        if after.first_step - span.first_step >= GOOD_PART * state.steps_finished > 0:
            yield span.first_step, after.first_step - 1, span.setting


def _state_at(run: RunDir, state: RunState, step: int) -> RunState | None:
    """As the record told when that step was finished; None where its oldest part is not whole any more."""
    times = [t for n, t in zip(state.series.steps, state.series.times, strict=True) if n <= step]
    if not times:
        return None
    stream = RunStream(run)
    then = stream.begin
    try:
        for batch in stream.batches(until=times[-1]):
            then = fold(then, batch)
    except LateLine:
        return None
    return then if then.ended is None else None
