"""Notices that a run's folder was removed: nobody could find the run any more, and nothing of it is kept."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmtop.profiler.record.rundir import RunDir

_LOOK_SECONDS = 0.5


class FolderWatch:
    """A folder that is away for a moment (moved back, a network drive) is waited for."""

    def __init__(
        self, run: RunDir, patience_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = run.path
        status = self._path.stat()
        self._identity = (status.st_dev, status.st_ino)
        self._patience_seconds, self._clock = patience_seconds, clock
        self._due = 0.0
        self._gone_since: float | None = None

    def gone(self) -> bool:
        """Whether it has been away for longer than that."""
        now = self._clock()
        if now >= self._due:
            self._due = now + _LOOK_SECONDS
            if self._is_there():
                self._gone_since = None
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
