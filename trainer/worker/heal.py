"""An out-of-memory inside a step that does not end the run: all ranks together halve the micro-batch, double
the accumulation and train on the same batch again.

What has been updated cannot be taken back, so only what fails before the update is healed here; so too only
where DeepSpeed's half-made gradients can be cleared (ZeRO 0 to 2 without offload). The supervisor relaunches
the others with the smaller micro-batch from their newest checkpoint.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunOptions
from llmtop.profiler.memory.halving import halved
from llmtop.profiler.oom.failure import innermost
from llmtop.profiler.oom.message import read_shortage, short_message
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.failureevents import StepHealed
from llmtop.trainer.statefile import Position
from llmtop.trainer.worker.data import Batches
from llmtop.trainer.worker.livesettings import set_batch
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.vote import PeerFailed, Vote

logger = logging.getLogger(__name__)

Train = Callable[[int, int], None]
"""A step by its number and its accumulation."""
_CLEARED = ("DeepSpeedZeroOptimizer", "FP16_Optimizer", "FP16_UnfusedOptimizer")
"""DeepSpeed's wrappers of ZeRO 1 and 2 and of 16-bit weights whose gradients `clear_gradients` knows."""


class Sizes(Protocol):
    """Who else knows the sizes of the batch: `LiveChanges`."""

    options: RunOptions


class Watching(Protocol):
    """What watches the steps: `TrainingProbes`."""

    def abandon_step(self) -> None: ...


class _Start(Struct, frozen=True, kw_only=True):
    """What a step began with."""

    position: Position
    generator: torch.Tensor
    device_generator: torch.Tensor | None


class NoHealing:
    """A step that fails ends the rank."""

    def attempt(self, step: int, grad_accum: int, train: Train) -> int:
        train(step, grad_accum)
        return grad_accum

    def before_update(self) -> None:
        """Nothing: nobody goes back."""


class Healing:
    """One rank's part; all ranks have one."""

    def __init__(
        self,
        engine: Any,
        batches: Batches,
        sizes: Sizes,
        probes: Watching,
        stages: StageLog,
        vote: Vote,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._sizes = sizes
        self._probes = probes
        self._stages = stages
        self._vote = vote
        self._emit = emit

    def attempt(self, step: int, grad_accum: int, train: Train) -> int:
        """Train on a batch until it fits; the accumulation that it took. Raises what cannot be healed."""
        while True:
            start, smaller = self._start(), self._smaller
            self._vote.open()
            try:
                train(step, grad_accum)
                return grad_accum
            except torch.OutOfMemoryError as error:
                if not self._vote.is_open:
                    raise  # some of the weights are updated
                self._vote.fail()
                if smaller is None:
                    raise
                told = replace(_healed(step, smaller), **_failure(error), stage=self._stages.current)
            except PeerFailed:
                if smaller is None:
                    raise
                told = _healed(step, smaller)
            finally:
                self._vote.close()
            # Outside the handlers, whose errors hold on to all that the step had made.
            self._heal(start, told)
            grad_accum = told.grad_accum

    def close(self) -> None:
        """After the last step."""
        self._vote.unwatch()

    def before_update(self) -> None:
        """Collective: after the last backward pass of a step; from here on nothing is taken back."""
        self._vote.all_well()
        self._vote.close()

    @property
    def _smaller(self) -> tuple[int, int] | None:
        options = self._sizes.options
        return halved(options.micro_batch, options.grad_accum)

    def _start(self) -> _Start:
        on_cuda = self._engine.device.type == "cuda"
        return _Start(
            position=self._batches.position,
            generator=torch.get_rng_state(),
            device_generator=torch.cuda.get_rng_state() if on_cuda else None,
        )

    def _heal(self, start: _Start, told: StepHealed) -> None:
        """Go back to the beginning of the step, with the smaller micro-batch."""
        micro_batch, grad_accum = told.micro_batch, told.grad_accum
        gc.collect()
        clear_gradients(self._engine)
        self._probes.abandon_step()
        self._batches.position = start.position
        torch.set_rng_state(start.generator)
        if start.device_generator is not None:
            torch.cuda.set_rng_state(start.device_generator)
            torch.cuda.empty_cache()
        self._batches.micro_batch = micro_batch
        set_batch(self._engine, micro_batch=micro_batch, grad_accum=grad_accum)
        self._sizes.options = replace(self._sizes.options, micro_batch=micro_batch, grad_accum=grad_accum)
        try:
            self._emit(told)
        except OSError:
            # A full disk must not end a training.
            logger.exception("that step %d was healed could not be reported", told.step)


def _healed(step: int, sizes: tuple[int, int]) -> StepHealed:
    return StepHealed(step=step, micro_batch=sizes[0], grad_accum=sizes[1])


def _failure(error: torch.OutOfMemoryError) -> dict[str, Any]:
    """What the event tells of the rank whose memory ran out."""
    message = str(error)
    return {
        "where": innermost(error),
        "message": short_message(message),
        "shortage": read_shortage(message),
    }


def can_heal(engine: Any) -> bool:
    """Whether the half-made gradients of a step can be cleared."""
    bare = engine.optimizer is engine.basic_optimizer
    offloaded = getattr(engine.optimizer, "cpu_offload", False)
    return not offloaded and (bare or type(engine.optimizer).__name__ in _CLEARED)


def clear_gradients(engine: Any) -> None:
    """As if the step had not begun: after a forward or backward pass that was broken off anywhere.

    Follows deepspeed 0.19.8 `zero/stage_1_and_2.py`, which undoes the same after an overflow (`step`), and
    its buckets, which a pass that ends normally empties itself.
    """
    for parameter in engine.module.parameters():
        parameter.grad = None
        if hasattr(parameter, "grad_accum"):
            parameter.grad_accum = None
    optimizer = engine.optimizer
    if not hasattr(optimizer, "ipg_buckets"):
        return
    optimizer.zero_grad(set_to_none=True)
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    optimizer.previous_reduced_grads.clear()
    optimizer._release_ipg_buffers()
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = None
    for group in optimizer.all_grad_tensors:
        optimizer.all_grad_tensors[group] = None
    optimizer.micro_step_id = -1  # its INITIAL_MICRO_STEP_ID
    optimizer._backward_active_depth = 0
    optimizer.clear_backward_seen_flag()
