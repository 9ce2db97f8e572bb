"""A log whose writer must not stop for it: what a full disk has no room for waits in memory.

Training goes on while nothing can be written. Lines wait in their order, up to a bound, and are written when
there is room again, with one that says how long that took and how many of them were too many to wait.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import WritingResumed
from llmtop.profiler.units import counted, format_seconds

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 16 << 20
"""About 20,000 steps of one rank."""
_BATCH_LINES = 256
_RETRY_SECONDS = 0.2


class PatientWriter(EventWriter):
    """`write` never raises OSError; `settle` waits for room where a process is about to end."""

    def __init__(
        self,
        path: Path,
        src: str,
        *,
        log: Callable[[str], None] = logger.warning,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        """`log` is told when lines begin to wait, and when they are written."""
        super().__init__(path, src)
        self.log = log
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._most_waiting_bytes = most_waiting_bytes
        self._full_since: float | None = None
        self._lost = 0

    @property
    def waits(self) -> bool:
        """Whether lines wait for room."""
        return bool(self._waiting)

    def forget_held(self) -> None:
        super().forget_held()
        self._waiting.clear()
        self._waiting_bytes = 0

    def settle(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> bool:
        """Write what is held and what waits, for as long as that may take; whether all was written."""
        deadline = clock() + seconds
        while True:
            self.flush()
            if not self._waiting:
                return True
            if clock() >= deadline:
                return False
            sleep(_RETRY_SECONDS)

    def _append(self, lines: Sequence[bytes]) -> None:
        self._waiting.extend(lines)
        self._waiting_bytes += sum(map(len, lines))
        while self._waiting:
            batch = [self._waiting[at] for at in range(min(_BATCH_LINES, len(self._waiting)))]
            written, error = self._write_batch(batch)
            for _ in range(written):
                self._waiting_bytes -= len(self._waiting.popleft())
            if error is not None:
                self._begin_to_wait(error)
                return
        if self._full_since is not None:
            self._tell_that_it_goes_on(self._full_since)

    def _write_batch(self, batch: list[bytes]) -> tuple[int, OSError | None]:
        """How many of the lines are whole in the file, and why not all."""
        before, torn = 0, self._torn
        try:
            self._turn_over()
            before, torn = os.fstat(self._descriptor).st_size, self._torn
            super()._append(batch)
        except OSError as error:
            end = os.fstat(self._descriptor).st_size
            at, whole = before + int(torn), 0
            for line in batch:
                at += len(line) + 1
                # A line that lacks only its end is whole: the next write begins with that.
                if at - 1 > end:
                    break
                whole += 1
            # Nothing of the next one may be there; then the last line has its end.
            self._torn = torn if end == before else not self._ends_whole(end)
            return whole, error
        return len(batch), None

    def _ends_whole(self, size: int) -> bool:
        return size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n"

    def _begin_to_wait(self, error: OSError) -> None:
        if self._full_since is None:
            self._full_since = self._clock.wall()
            self.log(f"{self.path} cannot be written, events wait: {error}")
        while self._waiting_bytes > self._most_waiting_bytes:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._lost += 1

    def _tell_that_it_goes_on(self, since: float) -> None:
        seconds, lost = self._clock.wall() - since, self._lost
        self._full_since, self._lost = None, 0
        lost_words = f"; {counted(lost, 'event')} were lost" if lost else ""
        self.log(f"{self.path} is written again after {format_seconds(seconds)}{lost_words}")
        self.tell_resumed(seconds, lost)

    def tell_resumed(self, seconds: float, lost: int) -> None:
        """Say in the log itself that it could not be written for a while."""
        told = self.stamp(WritingResumed(seconds=seconds, lost=lost))
        self._append([self._encode(told)])
