"""The supervisor's event log, which a full disk delays but does not break."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import AnyEvent, RunEnded

_RETRY_SECONDS = 0.2
SETTLE_SECONDS = 60.0
"""How long the last events wait for room on a full disk."""


class Journal:
    """Writes events in their order; those that cannot be written wait in memory until there is room."""

    def __init__(self, path: Path, src: str, *, log: Callable[[str], None]) -> None:
        self._writer = EventWriter(path, src)
        self._waiting: deque[AnyEvent] = deque()
        self._log = log
        self._failing = False

    def write(self, event: AnyEvent) -> None:
        """Stamp an event now, and write it now or later."""
        self._waiting.append(self._writer.stamp(event))
        self.flush()

    def flush(self) -> bool:
        """Write what waits; whether nothing does any more."""
        while self._waiting:
            try:
                self._writer.append(self._waiting[0])
            except OSError as error:
                if not self._failing:
                    self._failing = True
                    self._log(f"{self._writer.path} cannot be written, events wait: {error}")
                return False
            self._waiting.popleft()
        if self._failing:
            self._failing = False
            self._log(f"{self._writer.path} is written again")
        return True

    def write_last(self, end: RunEnded) -> None:
        """The last line of a run: while there is no room for it, it is waited for."""
        self.write(end)
        if not self.settle(SETTLE_SECONDS):
            self._log(f"the end could not be written: {end.state}: {end.reason}")

    def settle(self, seconds: float) -> bool:
        """Write what waits, for as long as that may take; whether all was written."""
        deadline = time.monotonic() + seconds
        while not self.flush():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_SECONDS)
        return True
