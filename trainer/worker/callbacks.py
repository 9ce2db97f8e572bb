"""What happens around the steps of the loop besides training."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.probes.phases import StepTimes
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.record.checkpointevents import CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.events import AnyEvent, StepFinished
from llmtop.profiler.units import format_seconds
from llmtop.trainer.statefile import Progress
from llmtop.trainer.worker.agreement import Agreed
from llmtop.trainer.worker.checkpoint import leaves_base_out, prune, save
from llmtop.trainer.worker.data import Batches
from llmtop.trainer.worker.state.apart import domains_of

logger = logging.getLogger(__name__)

Emit = Callable[[AnyEvent], None]
Hold = Callable[[Callable[[], AnyEvent]], None]
"""Takes what makes an event, which may be written a moment later: `EventWriter.hold`."""

LOG_EVERY_STEPS = 10
_STDOUT = 1


class StepOutcome(Struct, frozen=True, kw_only=True):
    """A finished step as it is known when its numbers are read."""

    step: int
    agreed: Agreed
    learning_rate: float | None
    grad_norm: Any
    """A float, or a tensor on the host: one on the device would be waited for."""
    loss_scale: float | None
    skipped: bool
    times: StepTimes | None
    """To be read when the device has got there."""
    reading: StepReading
    """All but the times."""
    in_use_only: bool = False
    """The process kept nothing that was freed (CPU kind)."""
    options: RunOptions | None = None
    """With which it was made; None: with those of the start."""


class Callback(Protocol):
    def after_step(self, step: int) -> None:
        """At the step's end, on every rank: may use collectives."""
        ...

    def after_outcome(self, outcome: StepOutcome) -> None:
        """When the step's numbers are known, on CUDA one step later."""
        ...

    def at_end(self, step: int, *, save_asked: bool) -> None:
        """After the last step, on every rank."""
        ...


def write_line(line: str) -> None:
    """To the rank's log at once: what stays in a buffer is lost with a rank that is killed."""
    os.write(_STDOUT, f"{line}\n".encode())


class StepLog:
    """A line in rank 0's log for its first step, for every tenth, and for the last."""

    def __init__(self, steps: int, rank: int, write: Callable[[str], None] = write_line) -> None:
        self._steps = steps
        self._rank = rank
        self._write = write
        self._begun = False

    def tell(self, outcome: StepOutcome, step_seconds: float | None) -> None:
        """Of each step, in their order."""
        step = outcome.step
        due = not self._begun or step % LOG_EVERY_STEPS == 0 or step == self._steps
        if self._rank != 0 or not due:
            return
        self._begun = True
        try:
            self._write(self._line(outcome, step_seconds))
        except OSError:
            # A full disk must not end a training.
            logger.exception("step %d could not be written to the log", step)

    def _line(self, outcome: StepOutcome, step_seconds: float | None) -> str:
        loss = outcome.agreed.loss
        words = "not finite" if loss is None else f"{loss:.4f}"
        skipped = ", skipped" if outcome.skipped else ""
        scale = "" if outcome.loss_scale is None else f", loss scale {outcome.loss_scale:g}"
        seconds = format_seconds(step_seconds)
        return f"step {outcome.step}/{self._steps}, loss {words}, step time {seconds}{scale}{skipped}"


class StepReporter:
    """One event for each step, and now and then a line of the log."""

    def __init__(self, spec: RunSpec, rank: int, hold: Hold, log: StepLog) -> None:
        self._spec = spec
        self._rank = rank
        self._hold = hold
        self._log = log

    def after_step(self, step: int) -> None:
        """Nothing: the numbers are not known yet."""

    def after_outcome(self, outcome: StepOutcome) -> None:
        # Made when it is written, with others: between two steps every line of Python runs on cold caches.
        self._hold(partial(self._event, outcome))

    def _event(self, outcome: StepOutcome) -> StepFinished:
        step_seconds, phase_seconds = self._times(outcome)
        self._log.tell(outcome, step_seconds)
        norm = None if outcome.grad_norm is None else float(outcome.grad_norm)
        options = outcome.options or self._spec.options
        return StepFinished(
            step=outcome.step,
            loss=outcome.agreed.loss if self._rank == 0 else None,
            learning_rate=outcome.learning_rate,
            grad_norm=norm if norm is not None and math.isfinite(norm) else None,
            loss_scale=outcome.loss_scale,
            skipped=outcome.skipped,
            tokens=options.micro_batch * options.grad_accum * options.seq_len * self._spec.world_size,
            micro_batch=options.micro_batch,
            grad_accum=options.grad_accum,
            step_seconds=step_seconds or 0.0,
            phase_seconds=phase_seconds,
            phase_memory=outcome.reading.phase_memory,
            memory_every=outcome.reading.memory_every,
            profiled=outcome.reading.profiled,
            in_use_only=outcome.in_use_only,
        )

    def _times(self, outcome: StepOutcome) -> tuple[float | None, dict[str, float | None]]:
        """Of the step and of its phases; nothing where the device has failed since, and tells no times."""
        times = outcome.times
        if times is None:
            return None, {}
        try:
            return times.step_seconds(), times.phase_seconds()
        except RuntimeError as error:
            logger.warning("the times of step %d cannot be read: %s", outcome.step, error)
            return None, {}

    def at_end(self, step: int, *, save_asked: bool) -> None:
        """Nothing more to say."""


class Checkpointer:
    """Saves every so many steps, when a stop asks for it, and at the end where the options say so."""

    def __init__(
        self,
        engine: Any,
        batches: Batches,
        spec: RunSpec,
        folder: Path,
        emit: Emit,
        *,
        before_saving: Callable[[], None] = lambda: None,
        resumed_step: int = 0,
    ) -> None:
        """`before_saving` is told of each save, which takes memory that no step needs. The checkpoint of
        `resumed_step`, which the run went on from, is never removed."""
        self.options = spec.options
        """How often, and whether at the end; may be replaced between two steps."""
        self._folder = folder
        self._engine = engine
        self._batches = batches
        self._world_size = spec.world_size
        self._only_trainable = leaves_base_out(spec)
        self._emit = emit
        self._before_saving = before_saving
        self._resumed_step = resumed_step
        self._saved_step = 0

    def after_step(self, step: int) -> None:
        every = self.options.checkpoint_every
        if every and step % every == 0:
            self._save(step)

    def after_outcome(self, outcome: StepOutcome) -> None:
        """Nothing: saving belongs to the step's end."""

    def at_end(self, step: int, *, save_asked: bool) -> None:
        if save_asked or self.options.save_at_end:
            self.save(step)

    def save(self, step: int) -> None:
        """Collective: save among the checkpoints, unless that step lies there already."""
        if step not in (0, self._saved_step):
            self._save(step)

    def save_into(self, folder: Path, step: int) -> str:
        """Collective: save for ranks that start right after these. Why not; empty when it is there."""
        if step in (0, self._saved_step):
            return ""  # there is nothing yet, or it lies among the checkpoints
        return self._save(step, folder, durable=False)

    def _save(self, step: int, folder: Path | None = None, *, durable: bool = True) -> str:
        """Why it was not saved; empty when it was."""
        self._before_saving()
        progress = Progress(step=step, position=self._batches.marked_position, world_size=self._world_size)
        saved = save(
            self._engine,
            folder or self._folder,
            progress,
            only_trainable=self._only_trainable,
            durable=durable,
        )
        if self._engine.global_rank == 0:
            self._emit(saved if durable else _passing(saved))
        if not isinstance(saved, CheckpointSaved):
            if self._engine.global_rank == 0:
                logger.warning("the checkpoint of step %d is refused: %s", step, saved.why)
            return saved.why
        self._saved_step = step
        if folder is None and self._writes_folder():
            self._remove_old()
        return ""

    def _writes_folder(self) -> bool:
        device = torch.device(self._engine.device)
        return domains_of(self._folder, device).writes(int(self._engine.global_rank))

    def _remove_old(self) -> None:
        """On one rank of each folder, once the new one is complete and reported."""
        if not self.options.keep_checkpoints:
            return
        try:
            prune(self._folder, self.options.keep_checkpoints, spare_step=self._resumed_step)
        except OSError as error:
            # Training goes on: what stays takes room, and a save that finds none is refused in words.
            logger.warning("an old checkpoint cannot be removed: %s", error)


def _passing(saved: CheckpointSaved | CheckpointRefused) -> CheckpointSaved | CheckpointRefused:
    return replace(saved, passing=True)
