"""What a rank does alone in a step, over all its steps, in few enough numbers to keep."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.record.stepevents import BEFORE_FORWARD, LeftOutSteps, StepFinished

PACE_BUCKETS = 32


class Pace(Struct, frozen=True, kw_only=True):
    """What a rank does alone in a step, over all steps after warm-up, in buckets of equal number."""

    sums: tuple[float, ...] = ()
    """Seconds of the steps in each bucket; the last one may be of fewer steps."""
    steps: int = 0
    stride: int = 1
    first_step: int = 0
    last_step: int = 0

    def mean(self, first: int, end: int) -> float:
        """Of the steps in the buckets from `first` up to `end`."""
        steps = min(self.steps, end * self.stride) - first * self.stride
        return sum(self.sums[first:end]) / steps

    def coarser(self, stride: int) -> Pace:
        """The same in larger buckets; `stride` is this one's times a power of two."""
        pace = self
        while pace.stride < stride:
            sums = (*pace.sums, 0.0) if len(pace.sums) % 2 else pace.sums
            joined = tuple(a + b for a, b in zip(sums[::2], sums[1::2], strict=True))
            pace = replace(pace, sums=joined, stride=2 * pace.stride)
        return pace

    def began(self, bucket: int) -> int:
        """About the first step of a bucket, as if those that are counted lay evenly."""
        apart = (self.last_step - self.first_step) / max(1, self.steps - 1)
        return self.first_step + round(bucket * self.stride * apart)


class PaceBuilder:
    """Adds steps to a pace; what is kept depends only on the steps."""

    def __init__(self, pace: Pace) -> None:
        self._sums = list(pace.sums)
        self._steps, self._stride = pace.steps, pace.stride
        self._first, self._last = pace.first_step, pace.last_step

    def add(self, event: StepFinished) -> None:
        forward = event.phase_seconds.get("forward")
        if forward is None:
            return
        before = (event.phase_seconds.get(name) or 0.0 for name in BEFORE_FORWARD)
        self._add(forward + sum(before), 1)
        self._first = self._first or event.step
        self._last = event.step

    def add_left_out(self, left_out: LeftOutSteps) -> None:
        """Steps before the next one: each as long as they were in the mean."""
        spent, steps = left_out.phase_seconds.get("forward", (0.0, 0))
        if steps:
            before = (left_out.phase_seconds.get(name, (0.0, 0)) for name in BEFORE_FORWARD)
            self._add(spent / steps + sum(taken / counted for taken, counted in before if counted), steps)

    def _add(self, seconds: float, steps: int) -> None:
        while steps > 0:
            inside = self._steps % self._stride
            if not inside:
                if len(self._sums) == PACE_BUCKETS:
                    pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
                    self._sums = [first + second for first, second in pairs]
                    self._stride *= 2
                self._sums.append(0.0)
            fitting = min(steps, self._stride - inside)
            self._sums[-1] += seconds * fitting
            self._steps += fitting
            steps -= fitting

    def freeze(self) -> Pace:
        return Pace(
            sums=tuple(self._sums),
            steps=self._steps,
            stride=self._stride,
            first_step=self._first,
            last_step=self._last,
        )
