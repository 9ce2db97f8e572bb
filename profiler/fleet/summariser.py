"""The supervisor of a host folds its ranks and writes their summary, at a bounded rate."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from llmtop.profiler.findings.find import findings
from llmtop.profiler.fleet.fewer import SEGMENT_BYTES, thin_summaries
from llmtop.profiler.fleet.summarise import summarise
from llmtop.profiler.fleet.summary import HostSummarised
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventlog import Clock, EventWriter
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.hosts import HostDir

EVERY_SECONDS = 2.0
"""Between two summaries at first."""
LATER_AFTER, LATER_SECONDS = 1800, 10.0
"""After so many of them, an hour's, they come more seldom."""
_THIN_AFTER = 100
"""Summaries after which it is looked whether their log is longer than its bound."""
_LOOK_SECONDS = 0.5
"""Between two looks for what is told at once."""
_MOST_EVENTS = 4000
"""Folded at a time, so that a turn of the supervisor stays short."""


class Summariser:
    """Called at each turn of a host's supervisor; what it costs does not grow with the run.

    A summary is written when its time has come and something has changed, and at once when the status has.
    """

    def __init__(
        self, run: HostDir, *, monotonic: Callable[[], float] = time.monotonic, clock: Clock | None = None
    ) -> None:
        self._run = run
        self._monotonic = monotonic
        source = f"host:{run.host.name}"
        self._writer = EventWriter(run.summary_path, source, clock=clock, segment_bytes=SEGMENT_BYTES)
        self._reader: RunReader | None = None
        """Made at the first turn: a run that is gone on with may have a long record."""
        self._look_due = self._due = 0.0
        self._before: RunState | None = None
        """The state that the times of the next summary begin at."""
        self._seen: RunState | None = None
        self._told: HostSummarised | None = None
        self._written = 0

    def turn(self) -> None:
        """Raises OSError where it cannot be written, and LlmtopError where the run cannot be read."""
        now = self._monotonic()
        if now < self._look_due:
            return
        self._look_due = now + _LOOK_SECONDS
        state = self._read(_MOST_EVENTS)
        has_news = self._seen is not None and state.status != self._seen.status
        if now >= self._due or has_news:
            self._due = now + (EVERY_SECONDS if self._written < LATER_AFTER else LATER_SECONDS)
            self._write(state)

    def finish(self) -> None:
        """Nothing more is written about the ranks: the last summary says all of it. Raises as `turn`."""
        self._write(self._read(None))
        self._writer.close()

    def _read(self, most_events: int | None) -> RunState:
        if self._reader is None:
            self._reader = RunReader(self._run)
        return self._reader.poll(most_events)

    def _write(self, state: RunState) -> None:
        if state is self._seen:
            return
        self._seen = state
        made = self._summary(state)
        self._writer.write(made)
        self._written += 1
        self._told = made
        if self._written % _THIN_AFTER == 0:
            thin_summaries(self._run.summary_path)

    def _summary(self, state: RunState) -> HostSummarised:
        setting = state.changes.setting
        spec, prediction = self._run.spec(setting), self._run.prediction(setting)
        found = findings(state, spec, prediction)
        made = summarise(self._run.host.name, state, spec, found, self._before)
        if made.seconds:
            self._before = state
        elif self._told is not None:
            # No step since: the newest there is are those that were told.
            made = replace(made, seconds=self._told.seconds)
        return made
