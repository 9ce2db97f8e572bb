"""What the probes see of a step, and the least that is done in one of which nothing but times is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from msgspec import Struct

from llmtop.profiler.probes.due import Marking
from llmtop.profiler.probes.phases import NO_MARKS, Marks, StepTimes
from llmtop.profiler.record.events import Phase, PhaseMemory


class StepReading(Struct, frozen=True, kw_only=True):
    """What the probes saw of one step. `times` is to be read when the device has got there."""

    times: StepTimes | None
    phase_memory: dict[str, PhaseMemory]
    """Empty for a step that was not read; may name `UNREAD_STEPS` beside the phases."""
    profiled: bool = False
    """Kernels were recorded: the times are not those of a step."""
    memory_every: int = 1
    """Of so many steps one is read."""


class PlainSteps(Struct, frozen=True):
    """The step under way and those after it in which nothing but times is taken.

    Around the engine's own calls all runs on caches that the training has swept, where a frame costs more
    than a microsecond. So the clock itself is handed out, and nobody has to be asked again before `until`.
    """

    marks: Marks
    """What ends a phase, in the steps that are marked."""
    marking: Marking
    finish_step: Callable[[], StepTimes | None]
    """None where the clock failed: then the probes are to be asked of the next step."""
    start_step: Callable[[], None]
    """The next step begins, if it is one of these."""
    until: float
    """The first step after these."""
    reading: StepReading
    """What was seen of each, but for its times."""

    def marks_of(self, step: int) -> Marks:
        """What ends a phase of this step; it keeps nothing where the step is not marked."""
        return self.marks if self.marking.is_marked(step) else NO_MARKS


class AtItsEnd:
    """A phase at whose end alone something is taken, made once and with as little as can be.

    Between two phases everything runs on caches that the training has swept: a call costs microseconds.
    """

    __slots__ = ("_failed", "_phase", "_stop")

    def __init__(self, phase: Phase, stop: Callable[[Phase], None], failed: Callable[[str], None]) -> None:
        self._phase = phase
        self._stop = stop
        self._failed = failed

    def __enter__(self) -> None:
        """Nothing: the phase began where the one before it ended."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._stop(self._phase)
            except Exception:  # noqa: BLE001 - shown in full by what it calls
                self._failed("times")
