"""Everything that a page of one run shows, read once and without secrets."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.effects.switches import Measured
from llmtop.profiler.export.environment import Environment, recorded_environment
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Component, MomentBytes, Prediction
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import report_of
from llmtop.profiler.report.contents import Report
from llmtop.profiler.report.history import History, read_history
from llmtop.profiler.report.settings import SettingReport, settings_of

_T = TypeVar("_T")


class MeasuredMoment(Struct, frozen=True, kw_only=True):
    """What one rank held at a moment of a step."""

    name: str
    components: dict[str, int]
    """Those of nothing are left out; `unexplained` is what nobody recognised."""
    total_bytes: int
    exact: bool
    """From the allocator's trace of the peak itself; else at the border of a phase."""


class PageData(Struct, frozen=True, kw_only=True):
    report: Report
    spec: RunSpec
    prediction: Prediction
    deepspeed: dict[str, Any]
    state: RunState
    """Figures and times of it are shown, none of its texts."""
    history: History
    predicted: tuple[MomentBytes, ...]
    measured: tuple[MeasuredMoment, ...]
    measured_rank: int | None
    environment: Environment
    settings: tuple[SettingReport, ...]
    """All that it trained on, the newest last."""


def scrubbed(scrubber: Scrubber, value: _T) -> _T:
    """A struct with the secrets taken out of every text in it."""
    return msgspec.convert(scrubber.value(msgspec.to_builtins(value)), type(value))


def read_page(run: RunDir, scrubber: Scrubber, others: tuple[Measured, ...] = ()) -> PageData:
    """`others` are the runs that the report's switches are compared with."""
    state = read_state(run)
    return page_of(run, state, read_history(run), scrubber, others)


def page_of(
    run: RunDir, state: RunState, history: History, scrubber: Scrubber, others: tuple[Measured, ...] = ()
) -> PageData:
    setting = state.changes.setting
    spec, prediction = run.spec(setting), run.prediction(setting)
    report = report_of(run, state, others)
    rank = report.peak_rank if report.peak_rank is not None else min(state.ranks, default=None)
    return PageData(
        report=scrubbed(scrubber, report),
        spec=scrubbed(scrubber, spec),
        prediction=prediction,
        deepspeed=scrubber.value(run.deepspeed_config(setting)),
        state=state,
        history=history,
        predicted=prediction.moments,
        measured=_measured(state, spec, rank),
        measured_rank=rank,
        environment=scrubbed(scrubber, recorded_environment(run)),
        settings=tuple(scrubbed(scrubber, setting) for setting in settings_of(run, state)),
    )


def _measured(state: RunState, spec: RunSpec, number: int | None) -> tuple[MeasuredMoment, ...]:
    rank = state.ranks.get(number) if number is not None else None
    if rank is None:
        return ()
    found: dict[str, MeasuredMoment] = {}
    runtime = rank.baseline.rss_bytes if spec.on_cpu and rank.baseline is not None else None
    for moment, seen in rank.classified.items():
        parts, total = dict(seen.components), seen.total_bytes
        if runtime:
            parts[Component.RUNTIME] = runtime
        if rank.peaks_in_use:
            # As in the table of the peak: freed memory that a process keeps is told apart from what it uses.
            kept = parts.pop(Component.FRAGMENTATION, 0)
            total = None if total is None else total - kept
        found[moment] = _moment(moment, parts, total, exact=False)
    for peak in rank.peaks_classified.values():
        known = found.get(peak.moment)
        if known is None or not known.exact or known.total_bytes < peak.total_bytes:
            found[peak.moment] = _moment(peak.moment, peak.components, peak.total_bytes, exact=True)
    return tuple(found.values())


def _moment(name: str, parts: dict[str, int], total: int | None, *, exact: bool) -> MeasuredMoment:
    told = {part: size for part, size in parts.items() if size}
    held = sum(told.values())
    if total is not None and total > held:
        told[Component.UNEXPLAINED] = told.get(Component.UNEXPLAINED, 0) + total - held
    return MeasuredMoment(name=name, components=told, total_bytes=max(held, total or 0), exact=exact)
