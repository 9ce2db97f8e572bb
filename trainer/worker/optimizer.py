"""Parameter groups, the optimizers that DeepSpeed does not build itself, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llmtop.presets.spec import LrSchedule, RunOptions

ParameterGroups = list[dict[str, Any]]


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> ParameterGroups:
    """One group; with weight decay two, because biases and norms are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay <= 0:
        return [{"params": trainable}]
    decayed = [parameter for parameter in trainable if _dimensions(parameter) > 1]
    kept = [parameter for parameter in trainable if _dimensions(parameter) <= 1]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def client_optimizer(
    options: RunOptions, deepspeed_config: dict[str, Any]
) -> Callable[[ParameterGroups], torch.optim.Optimizer] | None:
    """How to make the optimizer; None when the DeepSpeed configuration names one of its own."""
    if "optimizer" in deepspeed_config:
        return None
    common: dict[str, Any] = {
        "lr": options.learning_rate,
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
        "weight_decay": options.weight_decay,
    }
    if options.optimizer in ("adamw", "adamw_torch"):
        return partial(torch.optim.AdamW, **common)
    import bitsandbytes.optim as bnb

    classes = {
        "adamw_8bit": bnb.AdamW8bit,
        "paged_adamw_8bit": bnb.PagedAdamW8bit,
        "paged_adamw_32bit": bnb.PagedAdamW32bit,
    }
    return partial(classes[options.optimizer], **common)


def schedule_factor(step: int, *, kind: LrSchedule, steps: int, warmup_steps: int) -> float:
    """The learning rate of a step (counted from 0) as a fraction of the peak."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def client_schedule(
    options: RunOptions, deepspeed_config: dict[str, Any]
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
    """How to make the schedule, stepped once per optimizer step; None when DeepSpeed has its own."""
    if "scheduler" in deepspeed_config:
        return None
    factor = partial(
        schedule_factor, kind=options.lr_schedule, steps=options.steps, warmup_steps=options.warmup_steps
    )
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _dimensions(parameter: torch.nn.Parameter) -> int:
    """Of the whole parameter: under ZeRO-3 only its shape on paper is left."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
