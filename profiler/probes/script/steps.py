"""Steps and phases of a loop that is not ours, told by the calls that it makes.

What lies between the end of one step and the next forward pass counts as `data`: fetching the batch, and
whatever else the script does there, which `loader` tells apart where the batches are torch's loaders'.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
from msgspec import Struct

from llmtop.profiler.probes.allocator import Peaks
from llmtop.profiler.probes.hostcopy import send_to_host
from llmtop.profiler.probes.phases import Marks, StepTimes
from llmtop.profiler.probes.profiling import Profiling
from llmtop.profiler.probes.script.loader import Fetches, told_apart
from llmtop.profiler.probes.script.shapes import BatchShape
from llmtop.profiler.probes.stepreading import PlainSteps, StepReading
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import Phase, StepFinished
from llmtop.profiler.record.scriptevents import BatchSeen

ASK_SECONDS = 0.5
"""How often it is looked whether somebody asks for a snapshot."""
_GROWN = 1.02
"""A batch is told again when it has so many times the tokens of the largest before."""


class _Made(Struct, frozen=True):
    """A step that the device may still be working on. Made by places, as quickly as can be."""

    step: int
    micro_batches: int
    world_size: int
    batch: BatchShape | None
    loss: float | torch.Tensor | None
    """Of the step, on this rank; on its way to the host, as the norm is."""
    learning_rate: float | None
    grad_norm: float | torch.Tensor | None
    loss_scale: float | None
    skipped: bool
    disturbed: bool
    times: StepTimes | None
    reading: StepReading
    """All but the times."""
    fetch_seconds: float | None
    """What the script's data loaders took; None where none is known."""

    def event(self) -> StepFinished:
        """Waits for a device that has not got there."""
        times, batch = self.times, self.batch
        sequences = batch.sequences if batch is not None else 0
        tokens = 0 if batch is None else batch.tokens * self.micro_batches * self.world_size
        return StepFinished(
            step=self.step,
            loss=_finite(self.loss),
            learning_rate=self.learning_rate,
            grad_norm=_finite(self.grad_norm),
            loss_scale=self.loss_scale,
            skipped=self.skipped,
            tokens=tokens,
            micro_batch=max(1, sequences),
            grad_accum=max(1, self.micro_batches),
            step_seconds=times.step_seconds() if times else 0.0,
            phase_seconds=told_apart(times.phase_seconds(), self.fetch_seconds) if times else {},
            phase_memory=self.reading.phase_memory,
            memory_every=self.reading.memory_every,
            profiled=self.reading.profiled or self.disturbed,
        )


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
        self._on_cuda, self._on_cpu = device.type == "cuda", device.type == "cpu"
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
        self._plain: PlainSteps | None = None
        """The step is one of these, in which nothing but times is taken."""
        self._marks: Marks | None = None
        """Theirs."""
        self._ask_from = 0.0
        self._batch: BatchShape | None = None
        self._told_batch: BatchShape | None = None
        self._largest = 0
        self._unread: deque[tuple[torch.cuda.Event, _Made]] = deque()
        """With what tells that the device has got there."""
        self._begin_step(first_step)

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
        if not isinstance(loss, torch.Tensor):
            return
        if self._on_cpu and not loss.dim():
            # `tolist` reads the number itself, where `item` goes by way of an operator.
            part: Any = loss.tolist()
        elif loss.numel() == 1:
            part = _number(loss)
        else:
            return
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
        begun = self._begun
        if begun is None:
            return
        self._begun = None
        marks = self._marks
        if marks is not None:
            keep, mark = marks
            keep((begun, mark()))
            return
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def disturb(self) -> None:
        """Something else than training took time in this step: an evaluation."""
        self._disturbed = True

    def finish(
        self,
        learning_rate: float | None = None,
        grad_norm: float | torch.Tensor | None = None,
        loss_scale: float | None = None,
        skipped: bool = False,
    ) -> None:
        """The step is made, and the next one begins."""
        step, plain, loss, batch = self.step, self._plain, self._loss, self._batch
        assert step is not None
        if plain is None:
            reading = self._profiling.finish_step()
            times = reading.times
        else:
            times, reading = plain.finish_step(), plain.reading
            if times is None:
                plain = None
        if self._on_cuda:
            loss, grad_norm = send_to_host(loss), send_to_host(grad_norm)
        made = _Made(
            step,
            self.micro_batches,
            self._world_size,
            batch,
            loss,
            learning_rate,
            grad_norm,
            loss_scale,
            skipped,
            self._disturbed,
            times,
            reading,
            None if self.fetches is None else self.fetches.take(),
        )
        if batch is not self._told_batch:
            self._tell_batch()
        if self._on_cuda:
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record()
            self._unread.append((reached, made))
            self._tell_reached()
        else:
            self._events.hold(made.event)
        self.step = step = step + 1
        self.micro_batches, self._loss, self._batch, self._disturbed = 0, None, None, False
        self.micro_batch = self.current = None
        if time.monotonic() >= self._ask_from and self._look_for_requests(step):
            plain = None
        if plain is not None and step < plain.until:
            plain.start_step()
            self._marks = plain.marks_of(step)
        else:
            self._begin_step(step)

    def peaks(self) -> Peaks:
        """Of this process so far."""
        return self._probes.peaks()

    def close(self) -> None:
        """After the last step: what is still on its way is waited for."""
        for reached, _ in self._unread:
            reached.synchronize()
        self._tell_reached()
        self._profiling.close()
        self._probes.close()

    def _begin_step(self, step: int) -> None:
        self._plain = plain = self._profiling.begin_step(step)
        self._marks = None if plain is None else plain.marks_of(step)

    def _look_for_requests(self, coming_step: int) -> bool:
        """Whether a snapshot is asked for; it is to begin with the coming step, at the earliest."""
        self._ask_from = time.monotonic() + ASK_SECONDS
        asked = self._profiling.seen()
        if asked:
            self._profiling.take(asked, coming_step)
        return bool(asked)

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

    def _tell_reached(self) -> None:
        unread = self._unread
        while unread and _is_reached(unread[0][0]):
            self._events.hold(unread.popleft()[1].event)


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
