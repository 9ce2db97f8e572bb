"""What stood out for a good part of a run, on an earlier setting or on the one in force, and does no more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from llmtop.profiler.findings.find import findings
from llmtop.profiler.findings.finding import Finding, worst_first
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.feed import LateLine, RunStream
from llmtop.profiler.record.recording import logs_size_bytes
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.keptlooks import Look, LookedAt, keep_looks, read_looks
from llmtop.profiler.units import format_bytes

GOOD_PART = 0.25
"""Of the steps: what stood out for fewer, and a setting that made fewer, is not told of."""
LEAST_STEPS = 20
"""What stood out for fewer may have been chance."""
LOOKS = 16
"""Over a whole run."""
_MOST_LOOKS = 2 * LOOKS
"""With those at the ends of settings there are fewer, unless the record is damaged."""
MOST_BYTES = 256 << 20
"""Of a record that is read once more: about two seconds."""
_PASSING = frozenset({"hang", "host_memory_grows", "lost", "failed"})
"""Keys of what is of one moment alone, or of the end."""
FADING = frozenset(
    {
        *("straggler", "input_bound", "between_steps", "throttled", "host_bound", "communication_bound"),
        *("offload_bound_pcie", "offload_bound_cpu_adam", "nvme_bound", "other_work", "processor_limit"),
        *("gpu_hot", "nvlink_errors", "driver_silent", "loss_scale", "steps_skipped"),
    }
)
"""Keys of what a run may have for a while. The others follow from all that is known of it, as its peaks, and
fade because more is."""


class _Stretch(NamedTuple):
    """Of looks in a row that have found the same."""

    first: int
    last: int
    made: int
    """Steps in it."""
    finding: Finding


def with_earlier(run: RunDir, state: RunState, found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """`found` is what stands out at the end. What stood out before says of which steps; what it would have
    changed then is told, and no command, for another time or setting is in force."""
    looks = sorted((*_ends(state), *_within(state)))[:_MOST_LOOKS]
    if not looks:
        return found
    size_bytes = logs_size_bytes(run.event_logs())
    if size_bytes > MOST_BYTES:
        found = worst_first((*found, _not_looked_for(state, size_bytes)))
        looks = _first_settings(state, looks, size_bytes)
    seen = _seen(run, state, tuple(looks), size_bytes) if looks else ()
    known = {one.key for one in found} | _PASSING
    more = []
    for told in (_at_ends(seen), _faded(seen, GOOD_PART * _steps(state))):
        for first, last, one in told:
            if one.key not in known:
                known.add(one.key)
                evidence = f"in steps {first:,} to {last:,}: {one.evidence}"
                severity = "warning" if one.severity == "critical" else one.severity
                more.append(replace(one, severity=severity, evidence=evidence, command=""))
    return worst_first((*found, *more)) if more else found


def _seen(run: RunDir, state: RunState, looks: tuple[Look, ...], size_bytes: int) -> tuple[LookedAt, ...]:
    """At the looks, as an earlier report has kept it; else the record is read once more."""
    kept = read_looks(run, looks)
    if kept is not None:
        return kept
    seen = tuple(_look_again(run, looks))
    keep_looks(run, state, looks, seen, size_bytes)
    return seen


def _first_settings(state: RunState, looks: list[Look], size_bytes: int) -> list[Look]:
    """The ends of settings before which there are not too many bytes, if a step has as many as another."""
    steps = state.series.steps
    share = MOST_BYTES / size_bytes * _steps(state)
    return [look for look in looks if look.ends and look.last + 1 - min(steps) <= share]


def _not_looked_for(state: RunState, size_bytes: int) -> Finding:
    return Finding(
        key="record_too_long",
        severity="info",
        title="what stood out for a while may be missing here",
        evidence=f"the record has {format_bytes(size_bytes)}, and no more than {format_bytes(MOST_BYTES)} of"
        " it are read again for that",
        change=f"{state.command('replay')} shows it: n goes from one finding to the next",
    )


def _ends(state: RunState) -> Iterator[Look]:
    """The last step of each earlier setting that made a good part of the steps."""
    spans = state.changes.spans
    for number, (span, after) in enumerate(pairwise(spans)):
        last = after.first_step - 1
        times = [t for n, t in _rows(state, number) if n <= last]
        if times and after.first_step - span.first_step >= GOOD_PART * _steps(state):
            yield Look(times[-1], span.setting, span.first_step, last, ends=True)


def _within(state: RunState) -> Iterator[Look]:
    """Steps at about equal distances; where a setting is new, from its first one."""
    if _steps(state) < LEAST_STEPS:
        return
    apart = _steps(state) / LOOKS
    spans = state.changes.spans
    for number, span in enumerate(spans):
        first = span.first_step
        for n, t in _rows(state, number):
            if n >= first + apart - 1:
                yield Look(t, span.setting, first, n, ends=False)
                first = n + 1


def _steps(state: RunState) -> int:
    """How far it came, also where it was gone on with from an earlier step since."""
    steps = state.series.steps
    return max(steps) + 1 - min(steps) if steps else 0


def _rows(state: RunState, number: int) -> Iterator[tuple[int, float]]:
    """Steps on a setting, and when they were finished; without those that were lost where it went on from an
    earlier one."""
    series, spans = state.span_series(number), state.changes.spans
    kept = state.present_step or 0 if number + 1 == len(spans) else spans[number + 1].first_step - 1
    rows = []
    for n, t in zip(reversed(series.steps), reversed(series.times), strict=True):
        if n <= kept:
            rows.append((n, t))
            kept = n - 1
    return reversed(rows)


def _look_again(run: RunDir, looks: tuple[Look, ...]) -> Iterator[LookedAt]:
    """As the record told at each of the times, read once; none after where its oldest part is not whole."""
    stream = RunStream(run)
    then = stream.begin
    for look in looks:
        try:
            then = fold(then, chain.from_iterable(stream.batches(until=look.at)))
        except LateLine:
            return
        if then.ended is None:
            yield LookedAt(look, findings(then, run.spec(look.setting), run.prediction(look.setting)))


def _at_ends(seen: tuple[LookedAt, ...]) -> Iterator[tuple[int, int, Finding]]:
    for look, found in seen:
        if look.ends:
            yield from ((look.first, look.last, one) for one in found)


def _faded(seen: tuple[LookedAt, ...], least_steps: float) -> Iterator[tuple[int, int, Finding]]:
    """What looks in a row have found over so many steps, as it was at the last of them; each key once, where
    it held longest."""
    running: dict[str, _Stretch] = {}
    longest: dict[str, _Stretch] = {}
    for look, found in seen:
        if look.ends:
            continue
        before, running = running, {}
        for one in (one for one in found if one.key in FADING):
            stretch = before.get(one.key, _Stretch(look.first, 0, 0, one))
            made = stretch.made + look.last + 1 - look.first
            running.setdefault(one.key, _Stretch(stretch.first, look.last, made, one))
        for key, stretch in running.items():
            if stretch.made > longest.get(key, stretch._replace(made=0)).made:
                longest[key] = stretch
    for stretch in longest.values():
        if stretch.made >= max(least_steps, LEAST_STEPS):
            yield stretch.first, stretch.last, stretch.finding
