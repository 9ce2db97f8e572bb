"""One process of a script as the run sees it: its log, its rank, how it ended, and the way out.

Whatever fails here is told once and turns the watching of this process off; the script goes on.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from llmtop.profiler.oom.failure import failure_event
from llmtop.profiler.probes.script.newrun import begin_run
from llmtop.profiler.probes.script.steps import Steps
from llmtop.profiler.record.events import RankFinished
from llmtop.profiler.record.patientlog import PatientWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.scriptevents import HOOKED_RUN, RankDetached

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


_SETTLE_SECONDS = 5.0
"""How long the end of a script waits for room for its last events on a full disk."""


class RankTaken(Exception):
    """Another process of the script writes the log of this rank."""


class Watched:
    """This process, once something that trains has been found in it."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run = run
        self.rank = rank
        self._hold_rank()
        self.events = PatientWriter(run.events_path(rank), f"rank{rank}")
        self.steps: Steps | None = None
        self._undo: list[Callable[[], object]] = []
        self.off = False
        self._pid = os.getpid()
        self._earlier_hook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._finished)
        # A worker of a data loader is a copy of this process, and none of its ranks.
        os.register_at_fork(after_in_child=self._forget)

    @classmethod
    def here(cls) -> Watched | None:
        """This process as a rank of the run that launched it, or of one that begins now; None without one."""
        if not os.environ.get(HOOKED_RUN):
            begin_run()
        folder = os.environ.get(HOOKED_RUN)
        return None if not folder else cls(RunDir.open(Path(folder)), int(os.environ.get("RANK") or 0))

    def undo_with(self, undo: Callable[[], object]) -> None:
        """What puts back a call of the script's that was wrapped."""
        self._undo.append(undo)

    def guarded(
        self, call: Callable[Given, Answer], *given: Given.args, **named: Given.kwargs
    ) -> Answer | None:
        """The call's answer; None where it failed, which turns everything off."""
        if self.off:
            return None
        try:
            return call(*given, **named)
        except Exception as error:  # noqa: BLE001 - told, and the script must go on
            self.turn_off(error)
            return None

    def turn_off(self, error: BaseException) -> None:
        """Put everything back and say why."""
        self.off = True
        for undo in self._undo:
            undo()
        reason = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"llmtop: this process is not watched any more: {reason}\n")
        step = self.steps.last_finished if self.steps is not None else 0
        self.events.write(RankDetached(reason=reason, step=step))

    def _hold_rank(self) -> None:
        """One writer a log: a second process of this rank (another script of the command) is not watched."""
        lock = self.run.events_path(self.rank).with_suffix(".lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RankTaken(f"another process is rank {self.rank} of this run already") from None

    def _forget(self) -> None:
        self.off = True
        for undo in self._undo:
            undo()

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An exception that nobody caught is about to end the process."""
        mine = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if mine and self.steps is not None and isinstance(error, Exception):
            self.guarded(self._tell_failure, error)
        self._earlier_hook(kind, error, trace)

    def _tell_failure(self, error: Exception) -> None:
        assert self.steps is not None
        self.events.write(failure_event(error, self.steps))
        self.off = True

    def _finished(self) -> None:
        """The process ends as it should."""
        if os.getpid() == self._pid and self.steps is not None:
            self.guarded(self._tell_finished)

    def _tell_finished(self) -> None:
        assert self.steps is not None
        peaks = self.steps.peaks()
        self.steps.close()
        self.events.write(
            RankFinished(
                reason="completed",
                last_step=self.steps.last_finished,
                peak_allocated_bytes=peaks.allocated_bytes,
                peak_reserved_bytes=peaks.reserved_bytes,
                peak_rss_bytes=peaks.rss_bytes,
            )
        )
        self.events.settle(_SETTLE_SECONDS)
