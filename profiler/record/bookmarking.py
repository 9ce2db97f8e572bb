"""Keeps the bookmark of a run that goes on: whoever looks at it later need not fold all of its record."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.record.bookmark import write_bookmark
from llmtop.profiler.record.feed import LateLine, RunStream, anew, open_stream
from llmtop.profiler.record.rundir import RunDir

FOLD_EVERY_SECONDS = 2.0
FOLD_SECONDS = 0.02
"""At a time: a hundredth of a core where there is more to fold than that."""
WRITE_EVERY_SECONDS = 60.0
BEHIND_SECONDS = 5.0
"""Events are folded when they are as old as that: all logs have then been written so far."""
END_SECONDS = 2.0
"""Nobody who waits for the end of a run waits longer for its bookmark."""


class Bookmarker:
    """Folds the record of one run a little behind it, and writes the bookmark now and then."""

    def __init__(
        self,
        run: RunDir,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._wall, self._monotonic = run, wall, monotonic
        self._stream: RunStream | None = None
        """Opened at the first turn: a run that is gone on with may have a long record."""
        self._fold_due = 0.0
        self._write_due = monotonic() + WRITE_EVERY_SECONDS

    def turn(self) -> None:
        """Called as often as one likes."""
        now = self._monotonic()
        if now < self._fold_due:
            return
        self._fold_due = now + FOLD_EVERY_SECONDS
        self._fold(self._wall() - BEHIND_SECONDS, FOLD_SECONDS)
        if now >= self._write_due:
            self._write_due = now + WRITE_EVERY_SECONDS
            self._write()

    def finish(self, most_seconds: float = END_SECONDS) -> None:
        """Nothing more is written to the logs: fold what is left, and keep it."""
        if self._fold(None, most_seconds):
            self._write()

    def _fold(self, until: float | None, seconds: float) -> bool:
        """Whether it got as far as that."""
        deadline = self._monotonic() + seconds
        if self._stream is None:
            self._stream, self._state = open_stream(self._run)
        while True:
            try:
                return self._fold_on(self._stream, until, deadline)
            except LateLine:
                self._stream, self._state = anew(self._run)
                if self._monotonic() >= deadline:
                    return False

    def _fold_on(self, stream: RunStream, until: float | None, deadline: float) -> bool:
        for batch in stream.batches(until, strictly=True):
            self._state = fold(self._state, batch)
            if self._monotonic() >= deadline:
                return False
        return True

    def _write(self) -> None:
        if self._stream is not None and self._stream.given_bytes:
            self._stream.forget_given()
            write_bookmark(self._run, self._stream.bookmark(self._state))
