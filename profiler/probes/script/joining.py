"""Begins to watch what trains in this process, once it is known what that is."""

from __future__ import annotations

import os
from typing import Any

import torch

from llmtop.profiler.probes.baseline import baseline
from llmtop.profiler.probes.inmodules import model_built
from llmtop.profiler.probes.profiling import Profiling
from llmtop.profiler.probes.script.found import vocab_size
from llmtop.profiler.probes.script.loader import Fetches
from llmtop.profiler.probes.script.steps import Steps
from llmtop.profiler.probes.script.watching import Watched
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.scriptevents import RankAttached

CLASSIFY_EVERY = 100
"""Steps between exact classifications at least; more where they take much of a step."""
_LAST_WAIT_SECONDS = 30.0
"""How long the end of a script waits for a snapshot that is being written."""
_VERSIONED = (
    *("torch", "deepspeed", "transformers", "accelerate", "trl"),
    *("peft", "bitsandbytes", "liger-kernel", "flash-attn"),
)


def join(
    watched: Watched,
    engine: Any,
    model: Any,
    attached: RankAttached,
    device: torch.device,
    *,
    first_step: int = 1,
) -> Steps:
    """Tell what was found, and follow its steps from `first_step` on.

    `engine` has `module`, `optimizer` and `basic_optimizer`, as DeepSpeed's has; `model` is what is in its
    wrappers.
    """
    emit = watched.events.write
    emit(attached)
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    emit(baseline(local_rank=local_rank, device_used_before_bytes=None, on_cpu=device.type == "cpu"))
    emit(model_built(model, engine.basic_optimizer, engine.optimizer, _VERSIONED))
    probes = TrainingProbes(
        engine,
        device=device,
        vocab_size=vocab_size(model),
        classify_every=CLASSIFY_EVERY,
        sparing=True,
        # In the middle of a step: a write would take as long as to count the tensors.
        emit=lambda event: watched.events.hold(lambda: event),
    )
    profiling = Profiling(
        watched.run,
        probes,
        engine,
        rank=watched.rank,
        device=device,
        kernel_step=None,
        classify_every=lambda: probes.classify_every,
        emit=emit,
        last_wait_seconds=_LAST_WAIT_SECONDS,
    )
    watched.steps = Steps(
        probes,
        profiling,
        watched.events,
        device,
        world_size=attached.world_size,
        first_step=first_step,
    )
    watched.steps.fetches = Fetches(watched)
    return watched.steps
