"""Keeps the logs of a long run below their bounds, beside whoever writes them."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import SEGMENT_BYTES, log_bytes
from llmtop.profiler.record.thinning import USUAL_BOUNDS, Bounds, thin
from llmtop.profiler.units import format_bytes

_LOOK_SECONDS = 30.0


class ThinWatch:
    """One thread at a time thins one log after another; nothing that happens there ends a run."""

    def __init__(self, run: RunDir, log: Callable[[str], None], bounds: Bounds = USUAL_BOUNDS) -> None:
        self._run, self._log, self._bounds = run, log, bounds
        self._due = time.monotonic() + _LOOK_SECONDS
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()
        """Why logs could not be thinned, each once."""
        self._left: set[Path] = set()
        """Logs that are not thinned any more."""

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
        """Nothing more is written: what is under way ends, and a log a file longer than its bound is thinned.

        Less is left as it is: whoever waits for the end of a run does not wait for its record to be short.
        """
        if self._thread is not None:
            self._thread.join()
        self._thin_all(SEGMENT_BYTES)

    def _thin_all(self, spared_bytes: int = 0) -> None:
        most = self._bounds.whole + self._bounds.thinned + spared_bytes
        for path in self._run.event_logs():
            if path in self._left or log_bytes(path) <= most:
                continue
            freed = 0
            try:
                freed = thin(path, self._bounds)
            except OSError as error:
                # Most likely a full disk: the log is as it was, and tried again.
                if str(error) not in self._told:
                    self._log(f"{path.name} cannot be thinned: {error}")
                self._told.add(str(error))
            except Exception:  # noqa: BLE001 - training matters more than a short record; supervisor.log shows it
                self._log(f"{path.name} is thinned no more:\n{traceback.format_exc()}")
                self._left.add(path)
            if freed:
                self._log(f"{path.name} was thinned: {format_bytes(freed)} less")
