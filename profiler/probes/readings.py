"""Memory at the borders of phases: of every step at first, then as often as the cost of reading allows.

Readings at every border of every step take 0.15 ms of a step of the small CPU model, and about as much on an
H200. What is reached between two readings is kept by the counters, as one peak for all those steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median_low

from llmtop.profiler.probes.allocator import MemoryMeter, merge
from llmtop.profiler.record.events import UNREAD_STEPS, Phase, PhaseMemory

ALLOWED_SECONDS = 12.5e-6
"""Of each step, on average: an eighth of what all of watching may take."""
ALLOWED_SHARE = 0.000625
"""Of each step's time, likewise."""
COUNTED_SECONDS, COUNTED_SHARE = 10e-6, 0.0005
"""Of a script's step, likewise, for counting tensors: the larger of the two, so that in long steps they are
counted as often as ever."""
ALWAYS_READ_STEPS = 5
"""Of each process: the first ones take memory that later ones do not, and do not tell the cost."""
_EVERY = (1, 2, 5, 10, 20, 50, 100)
_RARER = (1, 2, 5, 10)
_REMEMBERED = 5


def counted_every(least: int, cost_seconds: float, step_seconds: float) -> int:
    """Of so many steps a script's tensors are counted in one: `least`, or more where that takes much."""
    allowed = max(COUNTED_SECONDS, COUNTED_SHARE * step_seconds)
    return least * next((times for times in _RARER if cost_seconds <= times * least * allowed), _RARER[-1])


class ReadingRate:
    """How often to read: asked at the start of each step, told what each reading took."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.every = 1
        """Of so many steps one is read: those whose number it divides, so that ranks read the same ones."""
        self.steps = 0
        """Begun so far."""
        self._clock = clock
        self._began = clock()
        self._asked: int | None = None
        """The step that was asked for last, which began then."""
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)

    def is_due(self, step: int) -> bool:
        """Whether this step is to be read; asked when it begins, though not of steps before `next_due`."""
        now = self._clock()
        # Those of which it was not asked count as one of their mean length.
        begun = 1 if self._asked is None else max(1, step - self._asked)
        self._step_seconds.append((now - self._began) / begun)
        self._began, self._asked = now, step
        self.steps += begun
        return self.steps <= ALWAYS_READ_STEPS or step % self.every == 0

    def next_due(self, step: int) -> int:
        """The first after `step`, which is under way, that is to be read."""
        return step + 1 if self.steps < ALWAYS_READ_STEPS else (step // self.every + 1) * self.every

    @property
    def step_seconds(self) -> float:
        """Of the newest steps."""
        return median_low(self._step_seconds)

    def took(self, seconds: float) -> None:
        """What the readings of a step took; of one with nothing else to look at."""
        self._costs.append(seconds)
        # Of two the lower: one that another process held up proves nothing.
        allowed = min(ALLOWED_SECONDS, ALLOWED_SHARE * self.step_seconds)
        cost = median_low(self._costs)
        self.every = next((every for every in _EVERY if cost <= every * allowed), _EVERY[-1])


class MemoryReadings:
    """What was read of one step, and the peak of those before it that were not."""

    def __init__(self, meter: MemoryMeter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.meter = meter
        self.rate = ReadingRate(clock)
        self.phases: dict[str, PhaseMemory] = {}
        """Of this step; empty when it is not read."""
        self.highest_phase_peak_bytes = 0
        """The allocator's, of any phase so far: what start-up reached is not a peak of training."""
        self._clock = clock
        self._seconds = 0.0
        self._unread = False
        """Whether steps have gone by since the last reading."""
        self._unread_memory: PhaseMemory | None = None
        self._settled = False

    def is_due(self, step: int) -> bool:
        """A step begins; whether it must be read. Then comes `start_step`, or `pass_step`."""
        self.phases = {}
        return self.rate.is_due(step) or self._settled

    def next_due(self, step: int) -> int:
        """The first after `step` of which `is_due` must be asked; those between pass as `step` did."""
        return step + 1 if self._settled else self.rate.next_due(step)

    def pass_step(self) -> None:
        """It is not read."""
        self._unread = True

    def start_step(self) -> None:
        """It is read."""
        began = self._clock()
        self._settled = False
        self._keep_unread()
        if self._unread_memory is not None:
            self.phases[UNREAD_STEPS] = self._unread_memory
            self._unread_memory = None
        self._seconds = self._clock() - began

    def stop_phase(self, phase: Phase) -> None:
        began = self._clock()
        memory = self.meter.stop_phase()
        self.phases[phase] = merge(self.phases.get(phase), memory)
        if memory.reserved_bytes is not None:
            self.highest_phase_peak_bytes = max(self.highest_phase_peak_bytes, memory.peak_bytes or 0)
        self._seconds += self._clock() - began

    def finish_step(self, *, plain: bool) -> None:
        """Of a step that was read; `plain` where nothing else was looked at."""
        if plain:
            self.rate.took(self._seconds)

    def settle(self) -> None:
        """Before what takes memory of its own between two steps: it is no step's. The next one is read."""
        if self._unread:
            self._keep_unread()
        self._settled = True

    def change(self) -> None:
        """Another setting begins: what earlier steps reached is not its peak, only the process's."""
        self.settle()
        self._unread_memory = None

    def _keep_unread(self) -> None:
        reached = self.meter.start_step()
        if self._unread:
            self._unread = False
            self._unread_memory = merge(self._unread_memory, reached)
