"""Requests to look closely at a live run: handed to its ranks, followed until all have written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotAsked, SnapshotTaken
from llmtop.profiler.record.snapshotrequest import SnapshotRequest, ask_for_snapshot, forget_snapshots
from llmtop.profiler.snapshots.estimate import check_snapshot, estimate_snapshot
from llmtop.trainer import control
from llmtop.trainer.supervisor.requests import Reply

_LEAST_LEAD_STEPS = 1
"""The step that is under way."""


class Followed(Protocol):
    """How far the ranks are."""

    @property
    def last_step(self) -> int: ...

    @property
    def least_step_seconds(self) -> float | None:
        """Of the newest steps that were not looked at closely."""
        ...

    @property
    def snapshots(self) -> Mapping[int, SnapshotTaken]:
        """The newest of each rank."""
        ...


class Snapshots:
    """One is under way at a time."""

    def __init__(
        self, run: RunDir, write: Callable[[AnyEvent], object], answer: Reply, *, lead_seconds: float = 0.0
    ) -> None:
        """Where ranks do not agree with each other on the step at which they begin, it is one so far ahead of
        the last that was heard of that all have read of it by then."""
        self._run = run
        self._lead_seconds = lead_seconds
        self._write = write
        self._answer = answer
        self._count = 0
        self._now: tuple[control.Request, SnapshotAsked] | None = None

    def forget(self, why: str) -> None:
        """Before ranks are started, and at the end: nobody carries out what was asked any more."""
        forget_snapshots(self._run)
        if self._now is not None:
            asked, _ = self._now
            self._now = None
            self._answer(asked, "refused", why)

    def take(
        self, asked: control.Request, spec: RunSpec, progress: Followed, world_size: int | None = None
    ) -> None:
        """Hand it to the ranks, or refuse it. `world_size` where the spec does not know it."""
        try:
            self._begin(asked, spec, progress, world_size or spec.world_size)
        except LlmtopError as error:
            self._answer(asked, "refused", error.in_one_line)
        except OSError as error:
            self._answer(asked, "refused", f"it cannot be written: {error.strerror or error}")

    def _begin(self, asked: control.Request, spec: RunSpec, progress: Followed, world_size: int) -> None:
        params = control.snapshot_params(asked)
        if self._now is not None:
            raise UsageError("another snapshot is under way", fix="ask again when it is done")
        check_snapshot(self._run, spec, params, last_step=progress.last_step, world_size=world_size)
        step = params.step
        if world_size > 1 and self._lead_seconds:
            step = max(step, progress.last_step + self._lead_steps(progress))
        number = self._count + 1
        told = SnapshotAsked(
            number=number,
            request_id=asked.request_id,
            what=params.what,
            ranks=params.ranks,
            step=params.step,
            steps=params.steps,
            with_stacks=params.with_stacks,
            expected_bytes=estimate_snapshot(spec, params).kept_bytes,
        )
        ask_for_snapshot(
            self._run,
            SnapshotRequest(
                number=number,
                what=params.what,
                ranks=params.ranks,
                step=step,
                steps=params.steps,
                with_stacks=params.with_stacks,
                stem=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{number}",
            ),
        )
        self._count = number
        self._now = asked, told
        self._write(told)
        self._answer(asked, "accepted", "")

    def _lead_steps(self, progress: Followed) -> int:
        # The quickest counts: where it is ahead of more steps than it has to be, ranks only begin later.
        quickest = progress.least_step_seconds or self._lead_seconds
        return _LEAST_LEAD_STEPS + math.ceil(self._lead_seconds / quickest)

    def poll(self, progress: Followed) -> None:
        """Answer once every rank has said what became of it."""
        if self._now is None:
            return
        asked, told = self._now
        written = {rank: progress.snapshots.get(rank) for rank in told.ranks}
        done = {rank: event for rank, event in written.items() if event and event.number == told.number}
        if len(done) < len(told.ranks):
            return
        self._now = None
        problems = {rank: event.problem for rank, event in done.items() if event.problem}
        if len(problems) == len(told.ranks):
            self._answer(asked, "refused", next(iter(problems.values())))
        else:
            self._answer(asked, "done", "; ".join(f"rank {rank}: {why}" for rank, why in problems.items()))
