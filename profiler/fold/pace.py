"""What a rank does alone in a step, over all its steps, in few enough numbers to keep."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.record.stepevents import BEFORE_FORWARD, LeftOutSteps, StepFinished

PACE_BUCKETS = 32


class Pace(Struct, frozen=True, kw_only=True):
    """What a rank does alone in a step, over the steps after warm-up that tell it, by step number.

    A bucket holds the steps from its number times `stride` on. So those of two ranks are of the same time,
    however many steps each of them tells.
    """

    sums: tuple[float, ...] = ()
    """Seconds of the steps in each bucket that tell them."""
    counts: tuple[int, ...] = ()
    """How many those are; may be 0."""
    stride: int = 1
    first_bucket: int = 0
    """The number of the first one that is kept."""
    first_step: int = 0

    @property
    def steps(self) -> int:
        return sum(self.counts)

    @property
    def end_bucket(self) -> int:
        """The number after the last one's."""
        return self.first_bucket + len(self.sums)

    def count(self, first: int, end: int) -> int:
        """Steps told in the buckets of these numbers, from `first` up to `end`."""
        return sum(self.counts[max(0, first - self.first_bucket) : max(0, end - self.first_bucket)])

    def mean(self, first: int, end: int) -> float | None:
        """Of those steps; None where there are none."""
        told = self.count(first, end)
        if not told:
            return None
        return sum(self.sums[max(0, first - self.first_bucket) : max(0, end - self.first_bucket)]) / told

    def coarser(self, stride: int) -> Pace:
        """The same in larger buckets; `stride` is this one's times a power of two."""
        pace = self
        while pace.stride < stride:
            sums, counts = list(pace.sums), list(pace.counts)
            _join(sums, counts, pace.first_bucket)
            pace = replace(
                pace,
                sums=tuple(sums),
                counts=tuple(counts),
                stride=2 * pace.stride,
                first_bucket=pace.first_bucket // 2,
            )
        return pace

    def began(self, bucket: int) -> int:
        """The first step of the bucket of this number."""
        return max(self.first_step, bucket * self.stride)


def _join(sums: list[float], counts: list[int], first_bucket: int) -> None:
    """Buckets of twice the steps: pairs that begin with an even number."""
    if first_bucket % 2:
        sums.insert(0, 0.0)
        counts.insert(0, 0)
    if len(sums) % 2:
        sums.append(0.0)
        counts.append(0)
    sums[:] = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    counts[:] = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)]


class PaceBuilder:
    """Adds steps to a pace; what is kept depends only on the steps."""

    def __init__(self, pace: Pace) -> None:
        self._sums, self._counts = list(pace.sums), list(pace.counts)
        self._stride, self._first_bucket = pace.stride, pace.first_bucket
        self._first = pace.first_step

    def add(self, event: StepFinished) -> None:
        forward = event.phase_seconds.get("forward")
        if forward is None:
            return
        before = (event.phase_seconds.get(name) or 0.0 for name in BEFORE_FORWARD)
        self._add(event.step, forward + sum(before), 1)

    def add_left_out(self, left_out: LeftOutSteps, next_step: int) -> None:
        """Steps before `next_step`: of the mean length; those that tell it lie evenly."""
        spent, told = left_out.phase_seconds.get("forward", (0.0, 0))
        if not told or not left_out.steps:
            return
        before = (left_out.phase_seconds.get(name, (0.0, 0)) for name in BEFORE_FORWARD)
        seconds = spent / told + sum(taken / counted for taken, counted in before if counted)
        first = next_step - left_out.steps
        # First the newest, which decides how large the buckets are.
        self._open(first)
        self._open(next_step - 1)
        at, done = first, 0
        while at < next_step:
            end = min(next_step, (at // self._stride + 1) * self._stride)
            here = told * (end - first) // left_out.steps
            if here > done:
                self._add(at, seconds, here - done)
            at, done = end, here

    def _add(self, step: int, seconds: float, steps: int) -> None:
        at = self._open(step)
        self._sums[at] += seconds * steps
        self._counts[at] += steps

    def _open(self, step: int) -> int:
        """The place of its bucket, which is there then."""
        if not self._sums:
            self._first, self._first_bucket = step, step // self._stride
        # A process that goes back to an earlier step than its first has no buckets of it.
        at = max(0, step // self._stride - self._first_bucket)
        while at >= PACE_BUCKETS:
            _join(self._sums, self._counts, self._first_bucket)
            self._stride *= 2
            self._first_bucket //= 2
            at = max(0, step // self._stride - self._first_bucket)
        while len(self._sums) <= at:
            self._sums.append(0.0)
            self._counts.append(0)
        return at

    def freeze(self) -> Pace:
        return Pace(
            sums=tuple(self._sums),
            counts=tuple(self._counts),
            stride=self._stride,
            first_bucket=self._first_bucket,
            first_step=self._first,
        )
