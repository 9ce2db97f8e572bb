"""The goals G1 to G5 and G7, and what a set of scores says to each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from benchmarks.accuracy.score import STATES, TEMPORARIES, Score
from benchmarks.stats import percentile
from benchmarks.summary import STRATA

STRATUM_PERCENT = 2.0
LIMIT_PERCENTS = tuple(percent for percent in range(-15, 16) if percent)
"""Limits that are put around what a run was measured to need, to ask whether it fits."""


class Spread(Struct, frozen=True, kw_only=True):
    """The sizes of some errors, in percent."""

    count: int
    bias: float
    mean: float
    p95: float
    worst: float


class Judged(Struct, frozen=True, kw_only=True):
    """One line of the goals: `met` is None where no row tells."""

    goal: str
    what: str
    asked: str
    figure: str
    count: int
    met: bool | None


class Verdicts(Struct, frozen=True, kw_only=True):
    """Fits or not, over limits around what was needed."""

    decisions: int
    false_fits: int
    fitting: int
    """Decisions on limits that the run does fit under."""
    false_refusals: int


def spread(percents: Sequence[float]) -> Spread | None:
    if not percents:
        return None
    sizes = [abs(percent) for percent in percents]
    return Spread(
        count=len(sizes),
        bias=statistics.fmean(percents),
        mean=statistics.fmean(sizes),
        p95=percentile(sizes, 0.95),
        worst=max(sizes),
    )


def judged(scores: Sequence[Score]) -> list[Judged]:
    """Every goal that measured rows can tell of."""
    return [
        _limits("G1", "peak allocated", _of(scores, lambda s: s.peak_percent), mean=0.8, p95=2.5, worst=5.0),
        _strata(scores),
        _coverage(scores),
        _limits("G2", "device memory", _of(scores, lambda s: s.device_percent), mean=2.0, p95=5.0),
        *_verdicts(scores),
        _limits("G4", "host memory under offload", _of(scores, lambda s: s.host_percent), mean=4.0, p95=10.0),
        _limits("G5", "step time from preset figures", _of(scores, lambda s: s.step_percent), mean=12.0),
        *(_resident(scores, name) for name in STATES),
        *(_at_peak(scores, name) for name in TEMPORARIES),
    ]


def _of(scores: Sequence[Score], figure: Callable[[Score], float | None]) -> list[float]:
    return [value for each in scores if (value := figure(each)) is not None]


def _limits(
    goal: str,
    what: str,
    percents: Sequence[float],
    *,
    mean: float | None = None,
    p95: float | None = None,
    worst: float | None = None,
) -> Judged:
    asked = {"mean": mean, "p95": p95, "worst": worst}
    limits = {name: limit for name, limit in asked.items() if limit is not None}
    seen = spread(percents)
    found = {} if seen is None else {name: float(getattr(seen, name)) for name in asked}
    return Judged(
        goal=goal,
        what=what,
        asked=", ".join(f"{name} <= {limit:g} %" for name, limit in limits.items()),
        figure=", ".join(f"{name} {value:.2f} %" for name, value in found.items()) or "n/a",
        count=len(percents),
        met=all(found[name] <= limit for name, limit in limits.items()) if found else None,
    )


class Stratum(Struct, frozen=True, kw_only=True):
    axis: str
    level: str
    errors: Spread

    @property
    def met(self) -> bool:
        return self.errors.mean <= STRATUM_PERCENT


def strata(scores: Sequence[Score]) -> Iterator[Stratum]:
    """The error of the peak by each level of each axis that the rows have."""
    for axis, level_of in STRATA.items():
        for level in sorted({level_of(each.row) for each in scores}):
            errors = spread([each.peak_percent for each in scores if level_of(each.row) == level])
            if errors is not None:
                yield Stratum(axis=axis, level=level, errors=errors)


def _strata(scores: Sequence[Score]) -> Judged:
    found = sorted(strata(scores), key=lambda stratum: stratum.errors.mean)
    worst = found[-1] if found else None
    return Judged(
        goal="G1",
        what="worst stratum of it",
        asked=f"mean <= {STRATUM_PERCENT:g} %",
        figure="n/a" if worst is None else f"{worst.axis} {worst.level}: mean {worst.errors.mean:.2f} %",
        count=len(found),
        met=None if worst is None else worst.met,
    )


def _coverage(scores: Sequence[Score]) -> Judged:
    held = sum(each.bound_holds for each in scores)
    share = held / len(scores) if scores else None
    return Judged(
        goal="interval",
        what="upper bound of the peak holds",
        asked=">= 99 % of rows",
        figure="n/a" if share is None else f"{100 * share:.1f} % ({held} of {len(scores)})",
        count=len(scores),
        met=None if share is None else share >= 0.99,
    )


def verdicts(scores: Sequence[Score]) -> Verdicts:
    """What the upper bound answers at every limit around every row's measured need."""
    decisions = false_fits = fitting = false_refusals = 0
    for measured, predicted in (each.need for each in scores if each.need is not None):
        for percent in LIMIT_PERCENTS:
            limit = measured * (1 + percent / 100)
            fits, said = measured <= limit, predicted <= limit
            decisions += 1
            fitting += fits
            false_fits += said and not fits
            false_refusals += fits and not said
    return Verdicts(
        decisions=decisions, false_fits=false_fits, fitting=fitting, false_refusals=false_refusals
    )


def _verdicts(scores: Sequence[Score]) -> Iterator[Judged]:
    seen = verdicts(scores)
    known = seen.decisions > 0
    of_fitting = 100 * seen.false_refusals / seen.fitting if known else 0.0
    of_all = 100 * seen.false_refusals / seen.decisions if known else 0.0
    yield Judged(
        goal="G3",
        what="false 'fits', limits within 15 %",
        asked="none",
        figure=f"{seen.false_fits} of {seen.decisions} decisions" if known else "n/a",
        count=seen.decisions // len(LIMIT_PERCENTS),
        met=seen.false_fits == 0 if known else None,
    )
    yield Judged(
        goal="G3",
        what="false refusals, limits within 15 %",
        asked="<= 8 % of those that fit",
        figure=f"{of_fitting:.1f} % of those that fit, {of_all:.1f} % of all" if known else "n/a",
        count=seen.decisions // len(LIMIT_PERCENTS),
        met=of_fitting <= 8.0 if known else None,
    )


def _resident(scores: Sequence[Score], name: str) -> Judged:
    found = [each.resident[name] for each in scores if name in each.resident]
    return _component(name, "between steps", found, 0.1, "of itself")


def _at_peak(scores: Sequence[Score], name: str) -> Judged:
    found = [each.at_peak[name] for each in scores if name in each.at_peak]
    return _component(name, "at the peak", found, 3.0, "of the peak")


def _component(name: str, where: str, percents: Sequence[float], limit: float, of: str) -> Judged:
    seen = spread(percents)
    over = sum(abs(percent) > limit for percent in percents)
    return Judged(
        goal="G7",
        what=f"{name.replace('_', ' ')} {where}",
        asked=f"each within {limit:g} % {of}",
        figure="n/a" if seen is None else f"mean {seen.mean:.3f} %, worst {seen.worst:.3f} %, {over} over",
        count=len(percents),
        met=None if seen is None else over == 0,
    )
