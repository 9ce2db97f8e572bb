"""Keeps a run's bookmark while the run lasts and when it has ended; nothing that happens there ends a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.profiler.record.rundir import RunDir


class BookmarkWatch:
    """The bookmark is a cache: without it whoever looks at the run reads longer."""

    def __init__(self, run: RunDir, log: Callable[[str], None]) -> None:
        self._bookmarker: Bookmarker | None = Bookmarker(run)
        self._log = log

    def turn(self) -> None:
        """Called at each turn of the supervisor; it works once in a few seconds."""
        self._do(Bookmarker.turn)

    def finish(self) -> None:
        """Nothing more is written about the run."""
        self._do(Bookmarker.finish)

    def _do(self, work: Callable[[Bookmarker], None]) -> None:
        if self._bookmarker is None:
            return
        try:
            work(self._bookmarker)
        except Exception:  # noqa: BLE001 - training matters more than a cache; supervisor.log shows it
            self._log(f"no bookmark is kept any more:\n{traceback.format_exc()}")
            self._bookmarker = None
