"""Rank 0's steps as columns, thinned so that a run of any length stays small enough to draw."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.record.events import StepFinished

ENOUGH_STEPS = 3
"""Steps after warm-up that a step time is taken from."""
_NUMBERS = ("count", "stride")
"""What is no column of a series."""
SERIES_POINTS = 2000
"""A longer series is halved. Even, so that halving one point more than this keeps the last."""


class Series(Struct, frozen=True, kw_only=True):
    """Oldest first. Points number 0, stride, 2 * stride, ... and the last one are kept."""

    steps: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    """Wall clock of each step's end."""
    losses: tuple[float | None, ...] = ()
    learning_rates: tuple[float | None, ...] = ()
    grad_norms: tuple[float | None, ...] = ()
    step_seconds: tuple[float, ...] = ()
    tokens_per_second: tuple[float | None, ...] = ()
    """None of a script's step whose tokens nobody could count."""
    profiled: tuple[bool, ...] = ()
    """Steps in which kernels were recorded: their times are left out of what is said about speed."""
    loss_scales: tuple[float | None, ...] = ()
    """None without fp16."""
    skipped: tuple[bool, ...] = ()
    """Steps that changed nothing. Of the steps that thinning leaves out nothing is told here."""
    launches: tuple[int, ...] = ()
    """Which processes made it, by how often they were started anew before. Steps of one launch ascend; the
    next may go on from an earlier one."""
    count: int = 0
    """Points before thinning."""
    stride: int = 1


_COLUMNS = tuple(name for name in Series.__struct_fields__ if name not in _NUMBERS)


def from_point(series: Series, launch: int, step: int) -> Series:
    """A step of one launch and all points after it."""
    return _cut(series, _index(series, launch, step), len(series.steps))


def before_point(series: Series, launch: int, step: int) -> Series:
    """All points before a step of one launch."""
    return _cut(series, 0, _index(series, launch, step))


def _index(series: Series, launch: int, step: int) -> int:
    points = range(len(series.steps))
    return bisect_left(points, (launch, step), key=lambda n: (series.launches[n], series.steps[n]))


def _cut(series: Series, begin: int, end: int) -> Series:
    if (begin, end) == (0, len(series.steps)):
        return series
    return replace(series, **{name: getattr(series, name)[begin:end] for name in _COLUMNS})


def warm(series: Series, warmup_steps: int) -> Iterator[int]:
    """Indexes of the points that are not among the first steps of their launch here."""
    firsts: dict[int, int] = {}
    for at, (launch, step) in enumerate(zip(series.launches, series.steps, strict=True)):
        if step >= firsts.setdefault(launch, step) + warmup_steps:
            yield at


def steady_steps(series: Series, warmup_steps: int) -> tuple[tuple[float, float | None], ...]:
    """Seconds and tokens a second of each step that tells how fast the run is.

    The first ones of each launch compile and allocate, and one step is slowed by the recording of its
    kernels. The steps that classify tensors stay: they are part of what a run costs.
    """
    seconds, rates, profiled = series.step_seconds, series.tokens_per_second, series.profiled
    return tuple(
        (seconds[at], rates[at]) for at in warm(series, warmup_steps) if seconds[at] > 0 and not profiled[at]
    )


def mean_rate(steady: tuple[tuple[float, float | None], ...]) -> float | None:
    """Tokens a second over those of `steady_steps` that tell them; None where none does."""
    known = [(seconds, rate) for seconds, rate in steady if rate is not None]
    spent = sum(seconds for seconds, _ in known)
    return sum(seconds * rate for seconds, rate in known) / spent if known else None


class MiddleHalf(Struct, frozen=True, kw_only=True):
    """Between which times the middle half of a run's steps lie: how much a step differs from the next."""

    low_seconds: float
    high_seconds: float

    @property
    def width_seconds(self) -> float:
        return self.high_seconds - self.low_seconds


def middle_half(steady: tuple[tuple[float, float | None], ...]) -> MiddleHalf | None:
    """Of `steady_steps`; None where they are too few to tell."""
    half = _middle_half([seconds for seconds, _ in steady])
    return None if half is None else MiddleHalf(low_seconds=half[0], high_seconds=half[1])


def middle_rates(steady: tuple[tuple[float, float | None], ...]) -> tuple[float, float] | None:
    """Between which tokens a second the middle half of `steady_steps` lie; None where too few tell them."""
    return _middle_half([rate for _, rate in steady if rate is not None])


def _middle_half(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < ENOUGH_STEPS:
        return None
    # Imported here: every command that lists runs would wait for it.
    from statistics import quantiles

    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def within_noise(change_seconds: float | None, *spreads: MiddleHalf | None) -> bool:
    """Whether two medians of step times differ by no more than chance, as `may_be_chance` says it."""
    halves = (None if spread is None else (spread.low_seconds, spread.high_seconds) for spread in spreads)
    return may_be_chance(change_seconds, *halves)


def may_be_chance(change: float | None, *halves: tuple[float, float] | None) -> bool:
    """Whether a figure of two runs differs by less than the steps of one run do, so that it may be chance.

    `halves` are the lowest and the highest of each run's middle half, in the unit of `change`. Middle halves
    that do not overlap are no chance, however wide one of them is.
    """
    known = [half for half in halves if half is not None]
    if change is None or not known:
        return False
    if max(low for low, _ in known) > min(high for _, high in known):
        return False
    return abs(change) < max(high - low for low, high in known)


class SeriesBuilder:
    """Adds points as rows. What is kept depends only on how many points there were, not on the cuts."""

    def __init__(self, series: Series) -> None:
        self._rows = list(zip(*(getattr(series, name) for name in _COLUMNS), strict=True))
        self._count, self._stride = series.count, series.stride

    def add(self, event: StepFinished, launch: int) -> None:
        if self._count and (self._count - 1) % self._stride:
            self._rows.pop()  # it was kept only for being the last
        rate = event.tokens / event.step_seconds if event.tokens and event.step_seconds > 0 else None
        rates = (event.learning_rate, event.grad_norm, event.step_seconds, rate, event.profiled)
        marks = (event.loss_scale, event.skipped, launch)
        self._rows.append((event.step, event.t, event.loss, *rates, *marks))  # as `_COLUMNS` has them
        self._count += 1
        if len(self._rows) > SERIES_POINTS:
            self._rows = self._rows[::2]
            self._stride *= 2

    def freeze(self) -> Series:
        if not self._rows:
            return Series()
        columns = dict(zip(_COLUMNS, zip(*self._rows, strict=True), strict=True))
        return Series(**columns, count=self._count, stride=self._stride)
