"""The training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunOptions
from llmtop.profiler.probes.enginefacts import learning_rate, loss_scale
from llmtop.profiler.probes.hostcopy import send_to_host
from llmtop.profiler.probes.phases import Marks, StepTimes
from llmtop.profiler.probes.stepreading import PlainSteps, StepReading
from llmtop.profiler.record.events import Phase
from llmtop.trainer.worker.agreement import Agreed, Agreement, Pending
from llmtop.trainer.worker.callbacks import Callback, StepOutcome
from llmtop.trainer.worker.data import Batches
from llmtop.trainer.worker.heal import NoHealing
from llmtop.trainer.worker.malloc import keep_freed_memory
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest


class Probes(Protocol):
    """What watches the loop: `TrainingProbes`, or nothing at all where the loop itself is measured."""

    def begin_step(self, step: int) -> PlainSteps | None: ...

    def phase(self, phase: Phase, *, last: bool) -> AbstractContextManager[None]: ...

    def finish_step(self) -> StepReading: ...


class Live(Protocol):
    """What may be changed between two steps: `LiveChanges`."""

    leaving: bool
    options: RunOptions

    def seen(self) -> int: ...

    def make(self, setting: int, step: int) -> None: ...

    def seen_save(self) -> int: ...

    def save(self, number: int, step: int) -> None: ...

    def seen_snapshot(self) -> int: ...

    def snapshot(self, number: int, step: int) -> None: ...


class Heals(Protocol):
    """What becomes of a step in which memory runs out: `Healing`."""

    def attempt(self, step: int, grad_accum: int, train: Callable[[int, int], None]) -> int: ...

    def before_update(self) -> None: ...


class LoopEnd(Struct, frozen=True, kw_only=True):
    reason: Literal["completed", "stopped"]
    last_step: int


class _Unread(Struct, frozen=True, kw_only=True):
    """A step that the device may still be working on."""

    step: int
    pending: Pending
    learning_rate: float | None
    grad_norm: float | torch.Tensor | None
    loss_scale: float | None
    skipped: bool
    times: StepTimes | None
    reading: StepReading
    """All but the times."""
    in_use_only: bool
    options: RunOptions | None


class Loop:
    """Trains an engine on batches from one step to another."""

    def __init__(
        self,
        engine: Any,
        batches: Batches,
        *,
        device: torch.device,
        world_size: int,
        grad_accum: int,
        probes: Probes,
        callbacks: Sequence[Callback],
        stages: StageLog,
        stop: StopRequest,
        exact_steps: int = 0,
        live: Live | None = None,
        healing: Heals | None = None,
    ) -> None:
        """In the first `exact_steps` freed memory leaves the process at once; then the heap keeps it.

        `live` is what may be changed between two steps; without it nothing is. `healing` is for a step in
        which memory runs out; without it the rank ends.
        """
        self._engine = engine
        self._batches = batches
        self._device = device
        self._grad_accum = grad_accum
        self._probes = probes
        self._callbacks = callbacks
        self._stages = stages
        self._stop = stop
        self._exact_steps = exact_steps
        self._live = live
        self._healing: Heals = healing if healing is not None else NoHealing()
        self._agreement = Agreement(device, world_size)
        self._unread: deque[_Unread] = deque()
        # On CUDA a step is read when the next one is under way, so that nothing waits for the device.
        self._lag = 1 if device.type == "cuda" else 0

    def run(self, first_step: int, last_step: int) -> LoopEnd:
        step = first_step - 1
        agreed = self._agreement.now(self._stop, self._seen_change())
        while step < last_step:
            agreed = self._change(agreed, step + 1)
            if agreed.stop or self._leaving:
                break
            step += 1
            self._stages.step = step
            if step == first_step:
                with self._stages("first_step"):
                    self._attempt(step)
            else:
                self._attempt(step)
            for callback in self._callbacks:
                callback.after_step(step)
            agreed = self._read_finished(self._lag, agreed)
        agreed = self._read_finished(0, agreed)
        for callback in self._callbacks:
            callback.at_end(step, save_asked=agreed.stop and agreed.save)
        return LoopEnd(reason="completed" if step >= last_step else "stopped", last_step=step)

    def _change(self, agreed: Agreed, step: int) -> Agreed:
        """Before `step`: make the checkpoint and the change that all ranks have seen, if there is one."""
        if self._live is None or agreed.stop:
            return agreed
        if agreed.checkpoint:
            self._live.save(agreed.checkpoint, step - 1)
        if agreed.snapshot:
            self._live.snapshot(agreed.snapshot, step)
        if not agreed.change:
            return agreed
        # The steps so far are told first: whoever reads the record must not take them for later ones.
        newest = self._read_finished(0, agreed)
        if not newest.stop:
            self._live.make(agreed.change, step)
            self._grad_accum = self._live.options.grad_accum
        return replace(newest, change=0)

    @property
    def _leaving(self) -> bool:
        return self._live is not None and self._live.leaving

    def _seen_change(self) -> int:
        return 0 if self._live is None else self._live.seen()

    def _seen_save(self) -> int:
        return 0 if self._live is None else self._live.seen_save()

    def _seen_snapshot(self) -> int:
        return 0 if self._live is None else self._live.seen_snapshot()

    def _attempt(self, step: int) -> None:
        self._grad_accum = self._healing.attempt(step, self._grad_accum, self._train_step)

    def _train_step(self, step: int, grad_accum: int) -> None:
        engine, probes, stages = self._engine, self._probes, self._stages
        loss_sum = torch.zeros((), device=self._device)
        plain = probes.begin_step(step)
        marks = None if plain is None else plain.marks_of(step)
        for micro in range(grad_accum):
            last = micro == grad_accum - 1
            stages.micro_batch = micro + 1 if grad_accum > 1 else None
            loss_sum += self._watched_loss(last) if marks is None else self._marked_loss(last, marks)
            rate = learning_rate(engine)
            bare_norm = _bare_gradient_norm(engine) if last else None
            if last:
                self._healing.before_update()
            stages.current = "optimizer"
            if marks is None:
                with probes.phase("optimizer", last=last):
                    engine.step()
            else:
                engine.step()
                keep, mark = marks
                keep(("optimizer", mark()))
        asked = (self._stop, self._seen_change(), self._seen_save(), self._seen_snapshot())
        pending = self._agreement.post(loss_sum, grad_accum, *asked)
        if plain is None:
            reading = probes.finish_step()
            times = reading.times
        else:
            times, reading = plain.finish_step(), plain.reading
        grad_norm = send_to_host(bare_norm if bare_norm is not None else engine.get_global_grad_norm())
        # After the last of what is read with it: the norm's copy and the probes' last event.
        pending.mark()
        stages.current = stages.micro_batch = None
        self._unread.append(
            _Unread(
                step=step,
                pending=pending,
                learning_rate=rate,
                grad_norm=grad_norm,
                loss_scale=loss_scale(engine),
                skipped=not engine.was_step_applied(),
                times=times,
                reading=reading,
                in_use_only=self._exact_steps > 0,
                options=None if self._live is None else self._live.options,
            )
        )
        if self._exact_steps:
            self._exact_steps -= 1
            if not self._exact_steps:
                keep_freed_memory()

    def _watched_loss(self, last: bool) -> torch.Tensor:
        """Of the next micro-batch, forward and backward; each phase within what watches it."""
        engine, probes, stages = self._engine, self._probes, self._stages
        stages.current = "data"
        with probes.phase("data", last=last):
            ids = self._next_ids()
        # Said for each micro-batch: DeepSpeed's own count goes wrong when grad_accum changes.
        engine.set_gradient_accumulation_boundary(last)
        stages.current = "forward"
        with probes.phase("forward", last=last):
            loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        stages.current = "backward"
        with probes.phase("backward", last=last):
            engine.backward(loss)
        return loss.detach()

    def _marked_loss(self, last: bool, marks: Marks) -> torch.Tensor:
        """The same in a step of which only times are taken: to be around a phase costs more than they do."""
        engine, stages = self._engine, self._stages
        keep, mark = marks
        stages.current = "data"
        ids = self._next_ids()
        keep(("data", mark()))
        engine.set_gradient_accumulation_boundary(last)
        stages.current = "forward"
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        keep(("forward", mark()))
        stages.current = "backward"
        engine.backward(loss)
        keep(("backward", mark()))
        return loss.detach()

    def _next_ids(self) -> torch.Tensor:
        ids = torch.from_numpy(self._batches.next_micro_batch())
        if self._device.type == "cuda":
            return ids.pin_memory().to(self._device, non_blocking=True)
        return ids

    def _read_finished(self, keep: int, agreed: Agreed) -> Agreed:
        """Report the steps that are done, but for the newest `keep`; what the last of them agreed on."""
        while len(self._unread) > keep:
            unread = self._unread.popleft()
            agreed = unread.pending.read()
            outcome = StepOutcome(
                step=unread.step,
                agreed=agreed,
                learning_rate=unread.learning_rate,
                grad_norm=unread.grad_norm,
                loss_scale=unread.loss_scale,
                skipped=unread.skipped,
                times=unread.times,
                reading=unread.reading,
                in_use_only=unread.in_use_only,
                options=unread.options,
            )
            for callback in self._callbacks:
                callback.after_outcome(outcome)
        return agreed


def _bare_gradient_norm(engine: Any) -> torch.Tensor | None:
    """Without a ZeRO or 16-bit wrapper DeepSpeed clips but does not tell the norm."""
    if engine.optimizer is not engine.basic_optimizer:
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
