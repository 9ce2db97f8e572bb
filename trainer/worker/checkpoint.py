"""Checkpoints: DeepSpeed's own files, how far the data was read, and a marker that all of it is there."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.events import CheckpointSaved
from llmtop.profiler.rundir import write_atomic
from llmtop.profiler.units import counted
from llmtop.trainer.worker.data import Position

_MARKER = "llmtop.json"
_TAG = re.compile(r"step-(\d+)")


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The marker of a complete checkpoint."""

    step: int
    position: Position
    world_size: int


def save(engine: Any, folder: Path, progress: Progress, *, only_trainable: bool) -> CheckpointSaved:
    """Collective. The checkpoint counts only when its marker, written last, is there."""
    began = time.perf_counter()
    tag = f"step-{progress.step}"
    engine.save_checkpoint(str(folder), tag=tag, exclude_frozen_parameters=only_trainable)
    torch.distributed.barrier()
    path = folder / tag
    if engine.global_rank == 0:
        write_atomic(path / _MARKER, msgspec.json.encode(progress))
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return CheckpointSaved(
        step=progress.step, path=str(path), size_bytes=size, seconds=time.perf_counter() - began
    )


def newest(folder: Path) -> Progress | None:
    """The furthest complete checkpoint in a folder."""
    found = [progress for path in folder.glob("step-*") if (progress := _read(path)) is not None]
    return max(found, key=lambda progress: progress.step, default=None)


def load(engine: Any, folder: Path, progress: Progress, *, only_trainable: bool) -> None:
    """Collective. Restores weights, optimizer and schedule of this rank."""
    if progress.world_size != engine.world_size:
        raise LlmtopError(
            f"the checkpoint of step {progress.step} was made by {counted(progress.world_size, 'rank')}",
            why=f"this run has {engine.world_size}, and DeepSpeed's shards belong to one world size",
            fix="start with as many GPUs as before",
        )
    path, _ = engine.load_checkpoint(
        str(folder), tag=f"step-{progress.step}", load_module_strict=not only_trainable
    )
    if path is None:
        raise LlmtopError(f"DeepSpeed found no checkpoint in {folder / f'step-{progress.step}'}")


def _read(path: Path) -> Progress | None:
    if _TAG.fullmatch(path.name) is None:
        return None
    try:
        return msgspec.json.decode((path / _MARKER).read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError):
        return None
