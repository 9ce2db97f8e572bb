"""Changes the settings of a DeepSpeed engine between two steps; to be called on all ranks at the same one.

DeepSpeed has a setter for the batch sizes alone, and that one leaves its own counts wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from llmtop.presets.spec import RunOptions
from llmtop.trainer.worker.kernels import disable_checkpointing, enable_checkpointing


def set_batch(engine: Any, *, micro_batch: int, grad_accum: int) -> None:
    """The engine divides each loss by `grad_accum`, and keeps counts by all three sizes."""
    global_batch = micro_batch * grad_accum * engine.dp_world_size
    engine.set_train_micro_batch_size(micro_batch)
    engine.set_train_batch_size(global_batch)
    # A lifetime count, of which DeepSpeed takes the remainder: one that is no multiple of the new
    # accumulation would end a step early (deepspeed 0.19.8 `is_gradient_accumulation_boundary`).
    engine.micro_steps = 0
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = grad_accum
    timer: Any = getattr(engine, "tput_timer", None)
    if hasattr(timer, "batch_size"):
        timer.batch_size = global_batch


def set_clipping(engine: Any, max_grad_norm: float) -> None:
    """ZeRO and 16-bit wrappers have a value of their own; without one the engine's configuration counts."""
    engine._config.gradient_clipping = max_grad_norm
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_grad_norm


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    """The peak of the schedule; the coming step has the schedule's share of it already.

    A schedule of DeepSpeed's own stays as it is: it has no single peak.
    """
    schedule = engine.lr_scheduler
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        return
    groups = engine.basic_optimizer.param_groups
    schedule.base_lrs = [learning_rate] * len(groups)
    for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = learning_rate
        group["lr"] = learning_rate * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in groups]


def set_checkpointing(engine: Any, options: RunOptions) -> None:
    """Raises UsageError, with nothing changed for good, for a model that cannot do it."""
    model = engine.module
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if options.gradient_checkpointing:
        enable_checkpointing(
            base, reentrant=options.checkpointing_reentrant, every=options.checkpointing_every
        )
    else:
        disable_checkpointing(base)


def restore_options(engine: Any, options: RunOptions) -> None:
    """After a checkpoint was loaded, which brings the learning rate and the clipping of its own time."""
    set_learning_rate(engine, options.learning_rate)
    set_clipping(engine, options.max_grad_norm)
