"""Snapshots of a rank of llmtop's own trainer, whose settings may change while it runs."""

from __future__ import annotations

from typing import Any

import torch

from llmtop.profiler.probes import profiling
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.worker.callbacks import Emit


class Profiling(profiling.Profiling):
    def __init__(
        self,
        run: RunDir,
        probes: TrainingProbes,
        engine: Any,
        *,
        rank: int,
        device: torch.device,
        kernel_step: int | None,
        emit: Emit,
        first_step: int = 1,
    ) -> None:
        super().__init__(
            run,
            probes,
            engine,
            rank=rank,
            device=device,
            kernel_step=kernel_step,
            classify_every=lambda: run.spec().options.classify_every,
            emit=emit,
            first_step=first_step,
        )
