"""Requests to look closely at a live run: handed to its ranks, followed until all have written."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotAsked
from llmtop.profiler.snapshots.estimate import check_snapshot, estimate_snapshot
from llmtop.trainer import control
from llmtop.trainer.change.livefile import SnapshotRequest, ask_for_snapshot, forget_snapshots
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.requests import Reply


class Snapshots:
    """One is under way at a time."""

    def __init__(self, run: RunDir, write: Callable[[AnyEvent], object], answer: Reply) -> None:
        self._run = run
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

    def take(self, asked: control.Request, spec: RunSpec, progress: Progress) -> None:
        """Hand it to the ranks, or refuse it."""
        try:
            self._begin(asked, spec, progress)
        except LlmtopError as error:
            self._answer(asked, "refused", error.in_one_line)
        except OSError as error:
            self._answer(asked, "refused", f"it cannot be written: {error.strerror or error}")

    def _begin(self, asked: control.Request, spec: RunSpec, progress: Progress) -> None:
        params = control.snapshot_params(asked)
        if self._now is not None:
            raise UsageError("another snapshot is under way", fix="ask again when it is done")
        check_snapshot(self._run, spec, params, last_step=progress.last_step)
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
                step=params.step,
                steps=params.steps,
                with_stacks=params.with_stacks,
                stem=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{number}",
            ),
        )
        self._count = number
        self._now = asked, told
        self._write(told)
        self._answer(asked, "accepted", "")

    def poll(self, progress: Progress) -> None:
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
