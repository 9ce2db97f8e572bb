"""Keeps the logs of a long run below their bounds, beside whoever writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import log_bytes
from llmtop.profiler.record.thinning import USUAL_BOUNDS, Bounds, thin
from llmtop.profiler.units import format_bytes

_LOOK_SECONDS = 30.0


class ThinWatch:
    """One thread at a time thins one log after another; nothing that happens there ends a run."""

    def __init__(self, run: RunDir, log: Callable[[str], None], bounds: Bounds = USUAL_BOUNDS) -> None:
        self._run, self._log, self._bounds = run, log, bounds
        self._due = time.monotonic() + _LOOK_SECONDS
        self._thread: threading.Thread | None = None
        self._failed = ""

    def turn(self) -> None:
        """Called at each turn of the supervisor; it looks once in half a minute."""
        if time.monotonic() < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = time.monotonic() + _LOOK_SECONDS
        most = self._bounds.whole + self._bounds.thinned
        if any(log_bytes(path) > most for path in self._run.event_logs()):
            self._thread = threading.Thread(target=self._thin_all, name="llmtop-thinning", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Nothing more is written: what is under way ends, and what has become too long since is thinned."""
        if self._thread is not None:
            self._thread.join()
        self._thin_all()

    def _thin_all(self) -> None:
        for path in self._run.event_logs():
            try:
                freed = thin(path, self._bounds)
            except OSError as error:
                # Most likely a full disk: the log is as it was, and tried again.
                if str(error) != self._failed:
                    self._log(f"{path.name} cannot be thinned: {error}")
                self._failed = str(error)
                return
            if freed:
                self._log(f"{path.name} was thinned: {format_bytes(freed)} less")
