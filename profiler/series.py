"""Rank 0's steps as columns, thinned so that a run of any length stays small enough to draw."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.events import StepFinished

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
    tokens_per_second: tuple[float, ...] = ()
    count: int = 0
    """Points before thinning."""
    stride: int = 1


class SeriesBuilder:
    """Adds points as rows. What is kept depends only on how many points there were, not on the cuts."""

    def __init__(self, series: Series) -> None:
        s = series
        columns = (s.steps, s.times, s.losses, s.learning_rates, s.grad_norms, s.step_seconds)
        self._rows = list(zip(*columns, s.tokens_per_second, strict=True))
        self._count, self._stride = s.count, s.stride

    def add(self, event: StepFinished) -> None:
        if self._count and (self._count - 1) % self._stride:
            self._rows.pop()  # it was kept only for being the last
        rate = event.tokens / event.step_seconds if event.step_seconds > 0 else 0.0
        rates = (event.learning_rate, event.grad_norm, event.step_seconds, rate)
        self._rows.append((event.step, event.t, event.loss, *rates))
        self._count += 1
        if len(self._rows) > SERIES_POINTS:
            self._rows = self._rows[::2]
            self._stride *= 2

    def freeze(self) -> Series:
        if not self._rows:
            return Series()
        steps, times, losses, learning_rates, grad_norms, seconds, rates = zip(*self._rows, strict=True)
        return Series(
            steps=steps,
            times=times,
            losses=losses,
            learning_rates=learning_rates,
            grad_norms=grad_norms,
            step_seconds=seconds,
            tokens_per_second=rates,
            count=self._count,
            stride=self._stride,
        )
