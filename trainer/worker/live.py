"""Makes the changes that are asked of a running rank, between two steps and on all ranks at the same one."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunOptions
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.change.livefile import LiveFile, SaveFile
from llmtop.trainer.worker.callbacks import Checkpointer, Emit
from llmtop.trainer.worker.data import Batches
from llmtop.trainer.worker.livesettings import (
    set_batch,
    set_checkpointing,
    set_clipping,
    set_learning_rate,
)
from llmtop.trainer.worker.profiling import Profiling

logger = logging.getLogger(__name__)

_MODEL = ("gradient_checkpointing", "checkpointing_every")


class LiveChanges:
    """What one rank can change while it trains."""

    def __init__(
        self,
        run: RunDir,
        engine: Any,
        batches: Batches,
        *,
        probes: TrainingProbes,
        checkpointer: Checkpointer,
        emit: Emit,
        profiling: Profiling | None = None,
    ) -> None:
        self._profiling = profiling
        self._setting = run.in_force().setting
        self.options = run.spec(self._setting).options
        """Those in force."""
        self.leaving = False
        """The state is saved and the ranks are to end: the change takes a relaunch."""
        self._run = run
        self._file = LiveFile(run)
        self._saves = SaveFile(run)
        self._saved = 0
        self._engine = engine
        self._batches = batches
        self._probes = probes
        self._checkpointer = checkpointer
        self._emit = emit

    def seen(self) -> int:
        """Number of a setting that this rank has been asked to go over to; 0 for none."""
        request = self._file.newest()
        return request.setting if request is not None and request.setting > self._setting else 0

    def seen_save(self) -> int:
        """Number of a checkpoint that this rank has been asked for and has not made; 0 for none."""
        request = self._saves.newest()
        return request.number if request is not None and request.number > self._saved else 0

    def save(self, number: int, step: int) -> None:
        """Collective: make a checkpoint that all ranks have seen, after `step`."""
        if number <= self._saved:
            return  # what the ranks agreed on a step later than they had made it
        self._saved = number
        self._checkpointer.save(step)

    def seen_snapshot(self) -> int:
        """Number of a snapshot that this rank has been asked for and has not begun; 0 for none."""
        return 0 if self._profiling is None else self._profiling.seen()

    def snapshot(self, number: int, step: int) -> None:
        """Begin a snapshot that all ranks have seen; `step` is the first that can be looked at."""
        if self._profiling is not None:
            self._profiling.take(number, step)

    def make(self, setting: int, step: int) -> None:
        """Go over to a setting that all ranks have seen; `step` is the first with it."""
        request = self._file.newest()
        if request is None or request.setting != setting or setting <= self._setting:
            return  # what the ranks agreed on a step later than they had made it
        self._setting = setting
        began = time.perf_counter()
        if request.leave:
            problem = self._checkpointer.save_into(self._run.path / request.folder, step - 1)
            self.leaving = not problem
            if self.leaving:
                return
        else:
            problem = self._change(self._run.spec(setting).options)
        seconds = time.perf_counter() - began
        try:
            self._emit(ChangeApplied(setting=setting, step=step, seconds=seconds, problem=problem))
        except OSError:
            # A full disk must not end a training.
            logger.exception("the change to setting %d could not be reported", setting)

    def _change(self, new: RunOptions) -> str:
        """Why it cannot be, which is the same on every rank; empty when it is made."""
        old, engine = self.options, self._engine
        try:
            self._change_what_may_fail(old, new)
        except UsageError as error:
            return error.in_one_line
        self._batches.micro_batch = new.micro_batch
        if (new.micro_batch, new.grad_accum) != (old.micro_batch, old.grad_accum):
            set_batch(engine, micro_batch=new.micro_batch, grad_accum=new.grad_accum)
        if new.max_grad_norm != old.max_grad_norm:
            set_clipping(engine, new.max_grad_norm)
        if new.learning_rate != old.learning_rate:
            set_learning_rate(engine, new.learning_rate)
        self._checkpointer.options = new
        self._probes.change(classify_every=new.classify_every)
        if engine.device.type == "cuda":
            # What the old sizes left in the allocator would count as the new setting's.
            torch.cuda.empty_cache()
        self.options = new
        return ""

    def _change_what_may_fail(self, old: RunOptions, new: RunOptions) -> None:
        """Raises UsageError with nothing changed."""
        changes_model = any(getattr(old, key) != getattr(new, key) for key in _MODEL)
        try:
            if changes_model:
                set_checkpointing(self._engine, new)
            if new.seq_len != old.seq_len:
                self._batches.change_seq_len(new.seq_len)
        except UsageError:
            if changes_model:
                set_checkpointing(self._engine, old)
            raise
