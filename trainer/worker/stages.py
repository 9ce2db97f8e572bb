"""Start-up stages as events, so that a stage that never ends shows where a run hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import StageBegan, StageFinished, StartupStage


class StageLog:
    """Reports stages of start-up and remembers where the process is, for the report of a failure."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self.current: str | None = None
        """The stage of start-up, later the phase of the step, that is going on."""
        self.step: int | None = None
        """The optimizer step that is going on, counted from 1."""
        self.micro_batch: int | None = None
        """Which of that step, counted from 1."""

    @contextmanager
    def __call__(self, stage: StartupStage) -> Iterator[None]:
        self.current = stage
        self._events.write(StageBegan(stage=stage))
        began = time.perf_counter()
        yield
        # Not in a finally: a stage that failed did not finish, and `current` names it in the report.
        self._events.write(StageFinished(stage=stage, seconds=time.perf_counter() - began))
        self.current = None
