"""Watches host memory fill up: warns in the record, and has the ranks save before the kernel kills one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.forecast import Forecast, forecast
from llmtop.profiler.hardware.disk import free_bytes
from llmtop.profiler.record.events import HardwareSampled
from llmtop.profiler.record.failureevents import Action, HostMemoryRunsOut
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_bytes
from llmtop.trainer.change.livefile import ask_to_save, forget_saves
from llmtop.trainer.change.restagefolder import state_bytes
from llmtop.trainer.supervisor.progress import Progress

WARN_SECONDS = 900.0
"""Memory that is forecast to be full within this is in the record; views tell of it earlier."""
SAVE_SECONDS = 120.0
"""Within this the ranks are asked for a checkpoint, once for each start of them."""
SAVE_FACTOR = 3.0
"""And within so many times as long as the last checkpoint and two steps took."""
_SPARE = 1.1
"""Room beyond the state itself."""
_SAMPLES = 300


class HostMemoryWatch:
    """For one start of the ranks."""

    def __init__(
        self, run: RunDir, write: Callable[[HostMemoryRunsOut], object], log: Callable[[str], None]
    ) -> None:
        self._run = run
        self._write = write
        self._log = log
        self._samples: deque[HardwareSampled] = deque(maxlen=_SAMPLES)
        self._warned = False
        self._asked = False
        try:
            forget_saves(run)
        except OSError as error:
            # The next ranks then make one checkpoint that nobody needs.
            log(f"{run.save_path} cannot be removed: {error}")

    def see(self, sample: HardwareSampled | None, progress: Progress, spec: RunSpec) -> None:
        """Look at the newest sample; costs nothing where it is the one that was seen last."""
        if sample is None or self._asked or self._samples and sample.t == self._samples[-1].t:
            return
        self._samples.append(sample)
        told = forecast(self._samples, progress.settled_at)
        if told is None or told.seconds is None or _ends_before(told.seconds, progress, spec):
            return
        if told.seconds <= _save_within(progress):
            self._asked = True
            self._have_saved(told, spec)
        elif told.seconds <= WARN_SECONDS and not self._warned:
            self._warned = True
            self._write(_event(told))

    def _have_saved(self, told: Forecast, spec: RunSpec) -> None:
        reason = self._why_no_room(spec)
        if reason:
            self._log(f"no checkpoint before host memory is full: {reason}")
            self._write(_event(told, "no_room", reason))
            return
        try:
            ask_to_save(self._run, 1)
        except OSError as error:
            self._write(_event(told, "no_room", f"the ranks cannot be asked: {error.strerror or error}"))
            return
        self._write(_event(told, "save_asked"))

    def _why_no_room(self, spec: RunSpec) -> str:
        """Why a checkpoint is not asked for; empty where it fits, as far as is known."""
        try:
            needed = int(_SPARE * state_bytes(spec, self._run.prediction()))
        except LlmtopError as error:
            self._log(f"how much a checkpoint takes is not known: {error.in_one_line}")
            return ""
        room = free_bytes(self._run.checkpoints_dir)
        if room is None or room >= needed:
            return ""
        return f"a checkpoint takes {format_bytes(needed)}, and {format_bytes(room)} are free there"


def _save_within(progress: Progress) -> float:
    saving = progress.checkpoint.seconds if progress.checkpoint is not None else 0.0
    return max(SAVE_SECONDS, SAVE_FACTOR * (saving + 2 * (progress.median_step_seconds or 0.0)))


def _ends_before(seconds: float, progress: Progress, spec: RunSpec) -> bool:
    step_seconds = progress.median_step_seconds
    if step_seconds is None:
        return False
    return (spec.options.steps - progress.last_step) * step_seconds < seconds


def _event(told: Forecast, action: Action = "warned", reason: str = "") -> HostMemoryRunsOut:
    assert told.seconds is not None
    return HostMemoryRunsOut(
        limit=told.limit,
        used_bytes=told.used_bytes,
        limit_bytes=told.limit_bytes,
        bytes_per_second=told.slope.per_second,
        seconds=told.seconds,
        action=action,
        reason=reason,
    )
