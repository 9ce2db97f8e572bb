"""Long silence of the ranks: a compiler at work, a lock that nobody holds, or a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from llmtop.presets.spec import RunOptions
from llmtop.profiler.record.events import Compiling, HangSuspected
from llmtop.trainer.supervisor.extensions import compiling, remove_stale_locks
from llmtop.trainer.supervisor.progress import HangWatch, Pulse

_QUIET_SECONDS = 2.0
"""Without news from the ranks for this long, compilers are looked for."""
_LOOK_SECONDS = 1.0


class Trouble:
    def __init__(
        self,
        extensions: Path | None,
        options: RunOptions,
        write: Callable[[Compiling | HangSuspected], object],
        log: Callable[[str], None],
    ) -> None:
        """`extensions` is where this run's ops are built; None: where that is, is not ours to look after."""
        self._extensions = extensions
        self._hang = HangWatch(options)
        self._write = write
        self._log = log
        self._compiling: str | None = None
        self._due = 0.0

    def take_options(self, options: RunOptions) -> None:
        """Another setting is in force."""
        self._hang = HangWatch(options)

    def remove_stale_locks(self) -> None:
        """Whoever meets a lock of a build that was killed waits for ever."""
        for lock in remove_stale_locks(self._extensions) if self._extensions is not None else ():
            self._log(f"removed {lock}, which a build that was killed had left")

    def look(self, progress: Pulse, pids: Iterable[int], *, waited_for: bool) -> bool:
        """Whether a hang is suspected, from now on; never of ranks that are waited for anyway."""
        now = time.monotonic()
        if now >= self._due and now - progress.moved_at > _QUIET_SECONDS:
            self._due = now + _LOOK_SECONDS
            found = compiling(pids)
            if found is not None and found != self._compiling:
                self._write(Compiling(what=found))
            self._compiling = found
            if found is None and not progress.stepped:
                self.remove_stale_locks()
        elif now - progress.moved_at <= _QUIET_SECONDS:
            self._compiling = None
        if waited_for:
            return False
        suspicion = self._hang.check(progress, compiling=self._compiling is not None)
        if suspicion is not None:
            self._write(suspicion)
        return suspicion is not None
