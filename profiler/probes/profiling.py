"""Snapshots of a rank that somebody asked for: begun between two steps, on all ranks at the same one. One is
taken unasked: of memory that is nearly full, once, by the rank whose device it is.

It stands between a loop, llmtop's own or a script's, and its probes. Steps that are looked at are slower, and
those of the other ranks with them, so every rank marks them as not of the usual pace. What fails is told and
never stops the training.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from msgspec.structs import replace

from llmtop.profiler.probes.due import is_classified
from llmtop.profiler.probes.nearlimit import NearLimit, near_limit_of
from llmtop.profiler.probes.snapshotting import MAKERS, Recording, Writing
from llmtop.profiler.probes.stepreading import PlainSteps, StepReading
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import AnyEvent, Phase
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotFile, SnapshotParams, SnapshotTaken
from llmtop.profiler.record.snapshotrequest import SnapshotRequest, SnapshotRequests
from llmtop.profiler.snapshots.estimate import ROOM_BYTES, estimate_snapshot
from llmtop.profiler.units import format_bytes

logger = logging.getLogger(__name__)

_FREE_WITHIN = 200
"""Steps in which one is looked for that no probe uses."""
UNASKED = 0
"""The number of a snapshot that nobody asked for."""
_LAST_WAIT_SECONDS = 120.0
"""How long a rank that has ended waits for what is being written."""


class Profiling:
    """A `Probes` of the loop, around those that are always on."""

    def __init__(
        self,
        run: RunDir,
        probes: TrainingProbes,
        engine: Any,
        *,
        rank: int,
        device: torch.device,
        kernel_step: int | None,
        classify_every: Callable[[], int],
        emit: Callable[[AnyEvent], None],
        first_step: int = 1,
        last_wait_seconds: float = _LAST_WAIT_SECONDS,
        near_limit: NearLimit | None = None,
    ) -> None:
        """In `kernel_step` the probes run torch's profiler themselves; `classify_every` tells in which other
        steps they are at work, beside the first ones from `first_step` on. `last_wait_seconds`: how long
        `close` waits for what is being written. `near_limit` is by default the device's own.
        """
        self._run = run
        self._probes = probes
        self._engine = engine
        self._rank = rank
        self._device = device
        self._kernel_step = kernel_step
        self._classify_every = classify_every
        self._first_step = first_step
        self._emit = emit
        self._last_wait_seconds = last_wait_seconds
        self._near_limit = near_limit or near_limit_of(device)
        self._requests = SnapshotRequests(run)
        self._done = 0
        self._request: SnapshotRequest | None = None
        """Begun and not ended."""
        self._first = self._step = 0
        self._stall_seconds = 0.0
        self._recording: Recording | None = None
        self._writing: list[tuple[SnapshotTaken, Writing, float]] = []
        """What is told, what writes it, and since when."""
        self._notes: tuple[str, ...] = ()

    # --- asked between two steps ------------------------------------------------------------------

    def seen(self) -> int:
        """Number of a snapshot that this rank has been asked for and has not begun; 0 for none."""
        request = self._requests.newest()
        return request.number if request is not None and request.number > self._done else 0

    def take(self, number: int, step: int) -> None:
        """Begin, on all ranks, what they have all seen; `step` is the first that can be looked at."""
        request = self._requests.newest()
        if request is None or request.number != number or number <= self._done:
            return  # what the ranks agreed on a step later than they had begun it
        self._done = number
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
        wanted = max(step, request.step)
        self._first = self._free_step(request, wanted)
        self._request = request
        self._notes = ()
        if self._first > request.step > 0:
            self._notes = (
                f"step {self._first} instead of {request.step}: it was over, or a probe was at work",
            )

    def _free_step(self, request: SnapshotRequest, wanted: int) -> int:
        """The first step from `wanted` on in which no probe of llmtop's own is at work."""
        every = self._classify_every()
        for first in range(wanted, wanted + _FREE_WITHIN):
            used = range(first, first + request.steps)
            classified = (is_classified(step, every, self._first_step) for step in used)
            if self._kernel_step not in used and not any(classified):
                return first
        # Every step is classified: torch's profiler still must not run twice at a time.
        kernel = self._kernel_step
        return kernel + 1 if kernel is not None and wanted <= kernel < wanted + request.steps else wanted

    # --- around a step ----------------------------------------------------------------------------

    def begin_step(self, step: int) -> PlainSteps | None:
        """As of the probes; None while a snapshot is waited for, taken or written."""
        self._step = step
        if self._request is not None and step == self._first and self._recording is None:
            self._begin(self._request)
        plain = self._probes.begin_step(step)
        if self._request is not None or self._recording is not None or self._writing:
            return None
        return plain

    def phase(self, phase: Phase, *, last: bool) -> AbstractContextManager[None]:
        if self._recording is None:
            return self._probes.phase(phase, last=last)
        return self._recorded(self._recording, phase, last=last)

    @contextmanager
    def _recorded(self, recording: Recording, phase: Phase, *, last: bool) -> Iterator[None]:
        with self._probes.phase(phase, last=last), recording.phase(phase):
            yield
        if last:
            self._guarded("phase_ended", phase)

    def finish_step(self) -> StepReading:
        reading = self._probes.finish_step()
        if self._writing:
            self._tell_written()
        # Most steps are neither read nor asked for: between two of them each call counts.
        if reading.phase_memory and self._request is None and self._near_limit is not None:
            self._look_at_room(self._near_limit, reading)
        request = self._request
        if request is None or self._step < self._first:
            return reading
        if self._step >= self._first + request.steps - 1:
            self._request = None
            if self._recording is not None:
                self._end(request, reading)
        return replace(reading, profiled=True)

    def close(self) -> None:
        """After the last step: what is being written is waited for."""
        request = self._request
        if request is not None and self._rank in request.ranks and request.number != UNASKED:
            self._tell(request, problem="the run ended before the step was over")
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
        for _, writing, _ in self._writing:
            writing.wait(self._last_wait_seconds)
        self._tell_written()

    # --- unasked ----------------------------------------------------------------------------------

    def _look_at_room(self, near_limit: NearLimit, reading: StepReading) -> None:
        """Where memory is nearly full: what it holds, from a coming step on, and first what that takes."""
        try:
            narrow = near_limit.look(reading.phase_memory)
            if narrow is None:
                return
            cost = estimate_snapshot(self._run.spec(), SnapshotParams(what="state", ranks=(self._rank,)))
            free = shutil.disk_usage(self._run.path).free
        except Exception:
            logger.exception("whether memory is nearly full could not be told")
            self._near_limit = None
            return
        told = f"memory is nearly full: {narrow.words}"
        if free < cost.kept_bytes + ROOM_BYTES:
            logger.warning("%s; no snapshot is taken, for the disk has %s free", told, format_bytes(free))
            return
        stem = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-nearly-full"
        request = SnapshotRequest(number=UNASKED, what="state", ranks=(self._rank,), stem=stem)
        self._first = self._free_step(request, self._step + 1)
        self._request, self._notes = request, (f"taken unasked: {told}",)
        logger.warning("%s; a snapshot of it is taken in step %d: %s", told, self._first, cost.in_words)

    # --- one snapshot -----------------------------------------------------------------------------

    def _begin(self, request: SnapshotRequest) -> None:
        if self._rank not in request.ranks:
            return
        began = time.perf_counter()
        try:
            folder = self._run.snapshots_dir
            folder.mkdir(mode=0o700, exist_ok=True)
            stem = folder / f"{request.stem}-rank-{self._rank}-{request.what}"
            recording = MAKERS[request.what](self._engine, self._device, self._rank, request, stem)
            recording.start(self._first)
        except Exception as error:  # noqa: BLE001 - told in the record
            self._failed(request, error)
            return
        self._recording = recording
        self._stall_seconds = time.perf_counter() - began

    def _guarded(self, call: str, *given: Any) -> None:
        if self._recording is None:
            return
        began = time.perf_counter()
        try:
            getattr(self._recording, call)(*given)
        except Exception as error:  # noqa: BLE001 - told in the record
            if self._request is not None:
                self._failed(self._request, error)
        self._stall_seconds += time.perf_counter() - began

    def _end(self, request: SnapshotRequest, reading: StepReading) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        began = time.perf_counter()
        try:
            writing = recording.finish(reading)
        except Exception as error:  # noqa: BLE001 - told in the record
            self._recording = recording
            self._failed(request, error)
            return
        stall = self._stall_seconds + time.perf_counter() - began
        told = SnapshotTaken(
            number=request.number,
            what=request.what,
            step=self._first,
            steps=request.steps,
            stall_seconds=stall,
            notes=self._notes,
        )
        self._writing.append((told, writing, began))
        self._tell_written()

    def _tell_written(self) -> None:
        """Of what is written by now."""
        left: list[tuple[SnapshotTaken, Writing, float]] = []
        for told, writing, began in self._writing:
            problem = writing.poll()
            if problem is None:
                left.append((told, writing, began))
                continue
            files = tuple(
                SnapshotFile(name=str(path.relative_to(self._run.path)), size_bytes=path.stat().st_size)
                for path in writing.paths
                if path.exists()
            )
            # A summary without its trace is worth having: then the word is a note.
            notes = (*told.notes, problem) if problem and files else told.notes
            self._say(
                replace(
                    told,
                    files=files,
                    notes=notes,
                    problem="" if files else problem or "no file was written",
                    seconds=time.perf_counter() - began,
                )
            )
        self._writing = left

    def _failed(self, request: SnapshotRequest, error: Exception) -> None:
        """In the handler of `error`: nothing of the snapshot goes on."""
        logger.exception("the snapshot asked for as number %d failed", request.number)
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                recording.abandon()
            except Exception:
                logger.exception("the snapshot could not be ended")
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            words = f"it cannot be written: {error.strerror or error}"
        self._tell(request, problem=words)

    def _tell(self, request: SnapshotRequest, *, problem: str) -> None:
        self._say(
            SnapshotTaken(
                number=request.number,
                what=request.what,
                step=self._first,
                steps=request.steps,
                problem=problem,
            )
        )

    def _say(self, event: SnapshotTaken) -> None:
        try:
            self._emit(event)
        except OSError:
            # A full disk must not end a training.
            logger.exception("snapshot %d could not be reported", event.number)
