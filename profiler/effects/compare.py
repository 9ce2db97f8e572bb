"""Two runs side by side: which options differ, how time and memory changed, what really ran in each.

Pure over two reports, so that the command and the app say the same. The change is always the second run
against the first; what makes the comparison unfair is said, not corrected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import fields, replace

from llmtop.presets.spec import Provenance, RunOptions, RunSpec, ValueSource
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.effects.evidence import ran_words
from llmtop.profiler.effects.load import load_words, others_percent
from llmtop.profiler.effects.switches import FEW_STEPS
from llmtop.profiler.fold.othersuse import device_is_shared
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import (
    MiddleHalf,
    may_be_chance,
    middle_half,
    middle_rates,
    steady_steps,
    within_noise,
)
from llmtop.profiler.memory.allocator import DRIVER_RESERVE_BYTES
from llmtop.profiler.memory.result import Component
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import report_of
from llmtop.profiler.report.contents import Report
from llmtop.profiler.report.settings import SettingReport, settings_of
from llmtop.profiler.units import counted

COMPARE_SCHEMA_VERSION = 1
LOAD_DIFFERS = "different load of the machine"
FOREIGN_BYTES = 256 * 1024**2
"""Held on the device by others, beyond the driver's own reserve."""

Unit = Literal["seconds", "tokens_per_second", "percent", "bytes", "loss"]
_RATES: dict[str, Unit] = {
    "tokens_per_second": "tokens_per_second",
    "mfu_percent": "percent",
    "needed_mfu_percent": "percent",
}
SPEED_FIGURES = ("step_seconds", *_RATES)
"""Names of the figures that the steps' times tell."""


class Side(Struct, frozen=True, kw_only=True):
    """One of the two runs, in what has to be alike for a comparison to be fair."""

    run_id: str
    name: str
    status: str
    model: str
    gpu: str
    world_size: int
    host: str
    data: str | None
    """This and the sequence length: None of a script of which they are not known."""
    seq_len: int | None
    tokens_per_step: int | None
    steps_finished: int
    timed_steps: int
    """Those that the step time is taken from."""
    step_spread: MiddleHalf | None
    """Between which times the middle half of them lie."""
    versions: dict[str, str]
    command: str = ""
    """Of a script: of its options only what was seen is known; empty for a run of llmtop's own trainer."""
    settings: tuple[SettingReport, ...] = ()
    """All that it trained on; the figures of the comparison are of the last one."""


class OptionDifference(Struct, frozen=True, kw_only=True):
    option: str
    first: Any
    second: Any
    first_from: Provenance | None
    """None: the run is a script of which this was not seen, and no value is known."""
    second_from: Provenance | None


class Change(Struct, frozen=True, kw_only=True):
    """One measured figure of both runs; null where it was not measured."""

    name: str
    unit: Unit
    first: float | None
    second: float | None
    change: float | None
    """Second minus first."""
    percent: float | None
    in_peak: bool = True
    """Of a component: whether it is part of the peak; else it is held beside it."""
    within_noise: bool = False
    """Of step time, throughput and MFU: they differ by less than the same figure of one run's steps does."""


class RanDifference(Struct, frozen=True, kw_only=True):
    what: str
    first: str | None
    """None: nothing of it was seen."""
    second: str | None


class Comparison(Struct, frozen=True, kw_only=True):
    schema_version: int = COMPARE_SCHEMA_VERSION
    first: Side
    second: Side
    options: tuple[OptionDifference, ...]
    """Those that differ, as far as they are known."""
    changes: tuple[Change, ...]
    loss_step: int | None
    """The step at which both losses were taken: the last one that both have."""
    ran: tuple[RanDifference, ...]
    """What the profiler and the modules say, whether it differs or not."""
    speed_within_noise: bool
    """Step time, throughput and MFU, as far as both have them, all differ by no more than chance."""
    unfair: tuple[str, ...]
    """Why a difference may not come from the options."""


def compare(first: RunDir, second: RunDir) -> Comparison:
    """Read both runs and put them side by side."""
    return comparison(_read(first), _read(second))


class _Read(Struct, frozen=True, kw_only=True):
    run: RunDir
    spec: RunSpec
    state: RunState
    report: Report
    reserved_bytes: int | None


def _read(run: RunDir) -> _Read:
    state = read_state(run)
    spec = run.spec(state.changes.setting)
    found = breakdown(state, spec, run.prediction(state.changes.setting))
    return _Read(
        run=run,
        spec=spec,
        state=state,
        report=_of_steps_alone(report_of(run, state, stands_out=False), state),
        reserved_bytes=None if state.made_no_step else found.reserved_bytes,
    )


def _of_steps_alone(report: Report, state: RunState) -> Report:
    """Without figures of the moment, which say nothing beside those of a run that has made its steps: what
    processes hold before their first step is no measure of the run."""
    if not state.made_no_step:
        return report
    host = replace(report.host_memory, ranks_pss_bytes=None)
    return replace(report, actual_device_bytes=None, host_memory=host)


def comparison(first: _Read, second: _Read) -> Comparison:
    loss_step, losses = _last_common_loss(first.state, second.state)
    sides = _side(first), _side(second)
    changes = (*_changes(first, second), change("loss", "loss", *losses))
    speed = [c for c in changes if c.name in SPEED_FIGURES and c.change is not None]
    return Comparison(
        first=sides[0],
        second=sides[1],
        options=tuple(_option_differences(first.spec, second.spec)),
        changes=changes,
        speed_within_noise=bool(speed) and all(c.within_noise for c in speed),
        loss_step=loss_step,
        ran=tuple(_ran(first.state, second.state)),
        unfair=tuple(_unfair(first, second, *sides)),
    )


def change(name: str, unit: Unit, first: float | None, second: float | None) -> Change:
    difference = None if first is None or second is None else second - first
    return Change(
        name=name,
        unit=unit,
        first=first,
        second=second,
        change=difference,
        percent=100 * difference / first if first and difference is not None else None,
    )


def _side(read: _Read) -> Side:
    report, spec = read.report, read.spec
    steady = _steady(read)
    return Side(
        run_id=report.run_id,
        name=report.name,
        status=report.status,
        model=report.model,
        gpu=report.gpu,
        world_size=report.world_size,
        host=report.host,
        data=_value(spec, "data"),
        seq_len=_value(spec, "seq_len"),
        command=report.command,
        tokens_per_step=report.tokens_per_step,
        steps_finished=report.steps_finished,
        timed_steps=len(steady),
        step_spread=middle_half(steady),
        versions=report.versions,
        settings=settings_of(read.run, read.state),
    )


def _option_differences(first: RunSpec, second: RunSpec) -> Iterator[OptionDifference]:
    for option in fields(RunOptions):
        name = option.name
        one, two = _value(first, name), _value(second, name)
        sources = _source(first, name), _source(second, name)
        if one == two and None not in sources:
            continue
        # Beside what is not known a default of llmtop's says nothing.
        if None in sources and all(one is None or one.source == ValueSource.DEFAULT for one in sources):
            continue
        yield OptionDifference(
            option=name, first=one, second=two, first_from=sources[0], second_from=sources[1]
        )


def _value(spec: RunSpec, option: str) -> Any:
    return getattr(spec.options, option) if spec.knows(option) else None


def _source(spec: RunSpec, option: str) -> Provenance | None:
    """None of a script's option that was not seen."""
    if not spec.knows(option):
        return None
    return spec.provenance.get(option) or Provenance(source=ValueSource.DEFAULT)


def _changes(first: _Read, second: _Read) -> Iterator[Change]:
    one, two = first.report, second.report
    slower = change("step_seconds", "seconds", one.step_seconds, two.step_seconds)
    yield replace(slower, within_noise=within_noise(slower.change, one.step_spread, two.step_spread))
    halves = [middle_rates(_steady(side)) for side in (first, second)]
    for name, unit in _RATES.items():
        values = [getattr(side, name) for side in (one, two)]
        found = change(name, unit, *values)
        # A run's MFU is so much of its throughput.
        scaled = (
            _scaled(half, value, side.tokens_per_second)
            for half, value, side in zip(halves, values, (one, two), strict=True)
        )
        yield replace(found, within_noise=may_be_chance(found.change, *scaled))
    yield change("peak_bytes", "bytes", one.actual_peak_bytes, two.actual_peak_bytes)
    outside = {c.component for side in (one, two) for c in side.components if not c.in_peak}
    yield from _component_changes(one, two, outside, in_peak=True)
    yield change("unexplained", "bytes", one.unexplained_bytes, two.unexplained_bytes)
    yield change("reserved_bytes", "bytes", first.reserved_bytes, second.reserved_bytes)
    yield from _component_changes(one, two, outside, in_peak=False)
    yield change("device_bytes", "bytes", one.actual_device_bytes, two.actual_device_bytes)
    yield change("host_bytes", "bytes", one.host_memory.ranks_pss_bytes, two.host_memory.ranks_pss_bytes)


def _steady(read: _Read) -> tuple[tuple[float, float | None], ...]:
    return steady_steps(read.state.setting_series, WARMUP_STEPS)


def _scaled(
    half: tuple[float, float] | None, value: float | None, rate: float | None
) -> tuple[float, float] | None:
    """The middle half of a run's rates in the unit of `value`, which its mean `rate` comes to."""
    if half is None or value is None or not rate:
        return None
    low, high = half
    return low * value / rate, high * value / rate


def _component_changes(one: Report, two: Report, outside: set[str], *, in_peak: bool) -> Iterator[Change]:
    """Rows inside the peak, which add up to it, or those beside it; beside it in one run is so in both."""
    parts = [
        {
            c.component: c.actual_bytes
            for c in side.components
            if (c.component not in outside) is in_peak and (in_peak or c.actual_bytes is not None)
        }
        for side in (one, two)
    ]
    for name in (component for component in Component if component in parts[0] | parts[1]):
        # A component that the breakdown leaves out was zero wherever another one was measured.
        values = [
            known.get(name, 0 if side.actual_peak_bytes is not None and (known or in_peak) else None)
            for known, side in zip(parts, (one, two), strict=True)
        ]
        yield replace(change(name, "bytes", *values), in_peak=in_peak)


def _last_common_loss(
    first: RunState, second: RunState
) -> tuple[int | None, tuple[float | None, float | None]]:
    losses = [
        {step: loss for step, loss in zip(s.series.steps, s.series.losses, strict=True) if loss is not None}
        for s in (first, second)
    ]
    step = max(losses[0].keys() & losses[1].keys(), default=None)
    return (None, (None, None)) if step is None else (step, (losses[0][step], losses[1][step]))


def _ran(first: RunState, second: RunState) -> Iterator[RanDifference]:
    ranks = [state.first for state in (first, second)]
    words = [ran_words(rank.kernels if rank else None) for rank in ranks]
    built = [rank.model if rank else None for rank in ranks]
    for what in words[0]:
        yield RanDifference(what=what, first=words[0][what], second=words[1][what])
    modules = [model.attention if model else None for model in built]
    yield RanDifference(what="attention in the modules", first=modules[0], second=modules[1])
    kernels = [", ".join(model.liger) or None if model else None for model in built]
    yield RanDifference(what="Liger in the modules", first=kernels[0], second=kernels[1])
    classes = [model.optimizer if model else None for model in built]
    yield RanDifference(what="optimizer's class", first=classes[0], second=classes[1])


def _unlike_versions(one: dict[str, str], two: dict[str, str]) -> Iterator[str]:
    """Also of packages that only one run has, once both have told theirs: until then only llmtop is known."""
    told = len(one) > 1 and len(two) > 1
    for name in dict.fromkeys((*one, *two)):
        left, right = one.get(name), two.get(name)
        if left != right and (told or (left and right)):
            yield f"{name} {left or 'not there'} in A, {right or 'not there'} in B"


def _unfair(first: _Read, second: _Read, one: Side, two: Side) -> Iterator[str]:
    if one.run_id == two.run_id:
        yield "A and B are one run"
        yield from _not_settled("A", first, one)
        return
    for what, left, right in (
        ("machines", one.host, two.host),
        ("GPUs", one.gpu, two.gpu),
        ("numbers of ranks", one.world_size, two.world_size),
        ("models", one.model, two.model),
        ("data", one.data, two.data),
        ("sequence lengths", one.seq_len, two.seq_len),
        ("tokens a step", one.tokens_per_step, two.tokens_per_step),
    ):
        if left != right and None not in (left, right):
            yield f"different {what}: {left} in A, {right} in B"
    if first.spec.model != second.spec.model and one.model == two.model:
        yield f"both models are called {one.model}, but their shapes differ"
    if load := load_words(others_percent(first.state), others_percent(second.state)):
        yield f"{LOAD_DIFFERS}: in A and B {load}"
    unlike = list(_unlike_versions(one.versions, two.versions))
    if unlike:
        yield f"different versions: {'; '.join(unlike)}"
    moments = [read.report.actual_moment for read in (first, second)]
    if None not in moments and moments[0] != moments[1]:
        left, right = (str(moment).replace("_", " ") for moment in moments)
        yield (
            f"different moments of the peak, and so components of different moments: {left} in A,"
            f" {right} in B"
        )
    for letter, read, side in (("A", first, one), ("B", second, two)):
        yield from _not_settled(letter, read, side)


def _not_settled(letter: str, read: _Read, side: Side) -> Iterator[str]:
    if went_on := _no_step_since(read.state):
        yield f"{letter} {went_on}"
    elif side.steps_finished == 0:
        yield f"{letter} has finished no step" + (
            ": it is still starting" if side.status == "starting" else ""
        )
    elif side.timed_steps < FEW_STEPS:
        steps = counted(side.timed_steps, "step")
        yield (
            f"{letter} has only {steps} to take times from, without the first {WARMUP_STEPS} and one whose"
            " kernels were recorded; small differences are noise"
        )
    if len(side.settings) > 1:
        last = side.settings[-1]
        yield f"{letter} was changed while it ran: {_since_words(read.state, last.first_step)}"
    if side.status in ("failed", "out_of_memory", "lost"):
        yield f"{letter} ended as {side.status.replace('_', ' ')}"
    if read.spec.on_cpu:
        return
    held = [
        rank.baseline.device_used_before_bytes
        for rank in read.state.ranks.values()
        if rank.baseline is not None and rank.baseline.device_used_before_bytes is not None
    ]
    crowded = any(map(device_is_shared, read.state.hardware_history))
    if crowded or (held and max(held) > DRIVER_RESERVE_BYTES + FOREIGN_BYTES):
        yield f"other processes were on a device of {letter}"


def _no_step_since(state: RunState) -> str:
    """Of a run that was gone on with and has made no step since, what that leaves out; empty for others."""
    if state.went_on is None or not state.made_no_step:
        return ""
    after = f" after step {state.present_step:,}" if state.present_step else ""
    speed = "; its speed is that of the steps before" if state.setting_series.steps else ""
    return f"went on{after} and has made no step since, so that its memory is not known{speed}"


def _since_words(state: RunState, first_step: int) -> str:
    """Which steps the figures of a run are of that was changed before `first_step`."""
    if not state.setting_series.steps:
        return f"its options are those since step {first_step:,}, and no step was made on them"
    if state.made_no_step:
        return f"its options and its speed are those since step {first_step:,}"
    return f"its options, memory and phases are those since step {first_step:,}, and so is its step time"
