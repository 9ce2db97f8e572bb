"""Notices that a run's folder was removed: nobody could find the run any more, and nothing of it is kept.

What a live run is reached by is put back where somebody has removed it: without the file that says who
supervises it, or the folder of requests, it would be told lost, and nothing could be asked of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir

_LOOK_SECONDS = 0.5
_MISSED_SECONDS = 3.0
"""Before something is put back: who removes the whole folder removes its files first."""


class FolderWatch:
    """A folder that is away for a moment (moved back, a network drive) is waited for."""

    def __init__(
        self, run: RunDir, patience_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._path = run, run.path
        self._me = process_identity(os.getpid())
        status = self._path.stat()
        self._identity = (status.st_dev, status.st_ino)
        self._patience_seconds, self._clock = patience_seconds, clock
        self._due = 0.0
        self._gone_since: float | None = None
        self._missed_since: float | None = None

    def gone(self) -> bool:
        """Whether it has been away for longer than that."""
        now = self._clock()
        if now >= self._due:
            self._due = now + _LOOK_SECONDS
            if self._is_there():
                self._gone_since = None
                self._put_back(now)
            elif self._gone_since is None:
                self._gone_since = now
        return self._gone_since is not None and now - self._gone_since >= self._patience_seconds

    def _is_there(self) -> bool:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True  # it cannot be asked just now
        return (status.st_dev, status.st_ino) == self._identity

    def _put_back(self, now: float) -> None:
        run = self._run
        knows_me = self._me is None or run.supervisor_identity() == self._me
        if knows_me and run.control_dir.is_dir():
            self._missed_since = None
            return
        if self._missed_since is None:
            self._missed_since = now
        if now - self._missed_since < _MISSED_SECONDS:
            return
        with suppress(OSError):  # a full disk, most likely: tried at the next look
            if not knows_me:
                run.write_supervisor_pid()
            run.control_dir.mkdir(mode=0o700, exist_ok=True)
