"""Steps and phases of a loop that is not ours, told by the calls that it makes.

What lies between the end of one step and the next forward pass counts as `data`: fetching the batch, and
whatever else the script does there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from msgspec import Struct

from llmtop.profiler.probes.allocator import Peaks
from llmtop.profiler.probes.hostcopy import send_to_host
from llmtop.profiler.probes.phases import Marks
from llmtop.profiler.probes.profiling import Profiling
from llmtop.profiler.probes.script.loader import Fetches, told_apart
from llmtop.profiler.probes.script.shapes import BatchShape
from llmtop.profiler.probes.training import StepReading, TrainingProbes
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import Phase, StepFinished
from llmtop.profiler.record.scriptevents import BatchSeen

ASK_SECONDS = 0.25
"""How often it is looked whether somebody asks for a snapshot."""
_GROWN = 1.02
"""A batch is told again when it has so many times the tokens of the largest before."""


class StepFacts(Struct, frozen=True, kw_only=True):
    """What the loop knows at the end of a step."""

    learning_rate: float | None = None
    grad_norm: float | torch.Tensor | None = None
    loss_scale: float | None = None
    skipped: bool = False


class _Unread(Struct, frozen=True, kw_only=True):
    """A step that the device may still be working on."""

    step: int
    micro_batches: int
    batch: BatchShape | None
    loss: float | torch.Tensor | None
    """Of the step, on this rank."""
    facts: StepFacts
    grad_norm: float | torch.Tensor | None
    """On its way to the host."""
    reading: StepReading
    fetch_seconds: float | None
    """What the script's data loaders took; None where none is known."""
    disturbed: bool
    reached: torch.cuda.Event | None


class Steps:
    """Where the loop of this process is. Every call is cheap and none waits for the device."""

    def __init__(
        self,
        probes: TrainingProbes,
        profiling: Profiling,
        events: EventWriter,
        device: torch.device,
        *,
        world_size: int,
        first_step: int = 1,
    ) -> None:
        """`profiling` is around the probes: every step and phase goes through it."""
        self.step: int | None = first_step
        """Under way, counted from 1."""
        self.current: str | None = None
        self.micro_batch: int | None = None
        self._probes = probes
        self._profiling = profiling
        self._events = events
        self.fetches: Fetches | None = None
        """What watches the script's data loaders."""
        # To ask a device for its type takes 15 us in a step.
        self._on_cuda = device.type == "cuda"
        self._world_size = world_size
        self.micro_batches = 0
        """Begun in this step."""
        self._backward_seen = False
        self._disturbed = False
        self._loss: float | torch.Tensor | None = None
        self._begun: Phase | None = None
        """The phase that was begun and has not ended."""
        self._inside: AbstractContextManager[None] | None = None
        """What is around it, where more than times is taken."""
        self._marks: Marks | None = None
        """What ends a phase where nothing but times is taken."""
        self._asked_at = 0.0
        self._batch: BatchShape | None = None
        self._told_batch: BatchShape | None = None
        self._largest = 0
        self._unread: deque[_Unread] = deque()
        profiling.step(first_step)
        self._marks = profiling.marks()

    @property
    def last_finished(self) -> int:
        return (self.step or 1) - 1

    # Calls, not contexts: between the engine's own they run on caches that the training has swept, where
    # every frame that is left out counts.

    def begin_forward(self, batch: BatchShape | None, *, last: bool) -> None:
        self.micro_batches += 1
        self.micro_batch = self.micro_batches
        self._backward_seen = False
        if batch is not None and batch is not self._batch:
            self._batch = batch if self._batch is None else self._batch.largest_with(batch)
        if self._marks is None:
            self._pass("data", last=last)
            self._enter("forward", last=last)
        else:
            keep, mark = self._marks
            keep(("data", mark()))
        self.current = self._begun = "forward"

    def begin_backward(self, *, last: bool) -> None:
        self._backward_seen = True
        if self._marks is None:
            self._enter("backward", last=last)
        self.current = self._begun = "backward"

    def end_backward(self, loss: Any, *, share: float = 1.0) -> None:
        """`share` of `loss` is this micro-batch's part of the step's."""
        self.end()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # On the CPU `tolist` reads the number itself, where `item` goes by way of an operator.
            part: Any = loss.tolist() if loss.is_cpu and not loss.dim() else _number(loss)
            part = part if share == 1.0 else part * share
            self._loss = part if self._loss is None else self._loss + part

    def begin_optimizer(self, *, last: bool) -> None:
        if not self._backward_seen:
            # It went backward by the loss itself: all since the forward pass is that.
            self._pass("backward", last=last)
        if self._marks is None:
            self._enter("optimizer", last=last)
        self.current = self._begun = "optimizer"

    def end(self) -> None:
        """The phase is over that was begun; nothing where none was."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        inside, self._inside = self._inside, None
        if self._marks is not None:
            keep, mark = self._marks
            keep((begun, mark()))
        elif inside is not None:
            inside.__exit__(None, None, None)

    def disturb(self) -> None:
        """Something else than training took time in this step: an evaluation."""
        self._disturbed = True

    def finish(self, facts: StepFacts) -> None:
        """The step is made, and the next one begins."""
        assert self.step is not None
        reading = self._profiling.finish_step()
        norm, loss, reached = facts.grad_norm, self._loss, None
        if self._on_cuda:
            norm, loss = send_to_host(norm), send_to_host(loss)
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record()
        self._unread.append(
            _Unread(
                step=self.step,
                micro_batches=self.micro_batches,
                batch=self._batch,
                loss=loss,
                facts=facts,
                grad_norm=norm,
                reading=reading,
                fetch_seconds=None if self.fetches is None else self.fetches.take(),
                disturbed=self._disturbed,
                reached=reached,
            )
        )
        if self._batch is not self._told_batch:
            self._tell_batch()
        self._tell_finished()
        self.step += 1
        self.micro_batches, self._loss, self._batch, self._disturbed = 0, None, None, False
        self.micro_batch = self.current = None
        if time.monotonic() >= self._asked_at + ASK_SECONDS:
            self._look_for_requests()
        self._profiling.step(self.step)
        self._marks = self._profiling.marks()

    def peaks(self) -> Peaks:
        """Of this process so far."""
        return self._probes.peaks()

    def close(self) -> None:
        """After the last step: what is still on its way is waited for."""
        for unread in self._unread:
            if unread.reached is not None:
                unread.reached.synchronize()
        self._tell_finished()
        self._profiling.close()
        self._probes.close()

    def _look_for_requests(self) -> None:
        """Of a snapshot that is to begin with the coming step, at the earliest."""
        self._asked_at = time.monotonic()
        asked = self._profiling.seen()
        if asked and self.step is not None:
            self._profiling.take(asked, self.step)

    def _enter(self, phase: Phase, *, last: bool) -> None:
        inside = self._profiling.phase(phase, last=last)
        inside.__enter__()
        self._inside = inside

    def _pass(self, phase: Phase, *, last: bool) -> None:
        """All since the last phase was this one."""
        if self._marks is not None:
            keep, mark = self._marks
            keep((phase, mark()))
            return
        with self._profiling.phase(phase, last=last):
            pass

    def _tell_batch(self) -> None:
        batch = self._told_batch = self._batch
        if batch is None or self.step is None or batch.tokens < _GROWN * self._largest + 1:
            return
        self._largest = batch.tokens
        self._events.write(
            BatchSeen(
                step=self.step,
                micro_batch=batch.sequences,
                seq_len=batch.length,
                grad_accum=max(1, self.micro_batches),
            )
        )

    def _tell_finished(self) -> None:
        unread = self._unread
        while unread and (unread[0].reached is None or _is_reached(unread[0].reached)):
            self._events.hold(partial(self._event, unread.popleft()))

    def _event(self, unread: _Unread) -> StepFinished:
        times, batch = unread.reading.times, unread.batch
        sequences = batch.sequences if batch is not None else 0
        tokens = 0 if batch is None else batch.tokens * unread.micro_batches * self._world_size
        return StepFinished(
            step=unread.step,
            loss=_finite(unread.loss),
            learning_rate=unread.facts.learning_rate,
            grad_norm=_finite(unread.grad_norm),
            loss_scale=unread.facts.loss_scale,
            skipped=unread.facts.skipped,
            tokens=tokens,
            micro_batch=max(1, sequences),
            grad_accum=max(1, unread.micro_batches),
            step_seconds=times.step_seconds() if times else 0.0,
            phase_seconds=told_apart(times.phase_seconds(), unread.fetch_seconds) if times else {},
            phase_memory=unread.reading.phase_memory,
            memory_every=unread.reading.memory_every,
            profiled=unread.reading.profiled or unread.disturbed,
        )


def _number(loss: torch.Tensor) -> float | torch.Tensor:
    """On a GPU it stays there: to read it would be to wait for it."""
    if loss.is_cpu:
        return loss.item()
    part = loss.detach()
    return (part.reshape(()) if part.dim() else part).float()


def _is_reached(mark: torch.cuda.Event) -> bool:
    return bool(mark.query())  # type: ignore[no-untyped-call]


def _finite(number: Any) -> float | None:
    value = None if number is None else float(number)
    return value if value is not None and math.isfinite(value) else None
