"""The CUDA allocator's blocks in the file that PyTorch's memory_viz reads, and reduced to a table.

The file is a pickle because memory_viz reads nothing else; llmtop writes it and never reads one.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.cuda import memory as cuda_memory
from torch.utils.checkpoint import set_checkpoint_early_stop

from llmtop.profiler.probes.classify import classify
from llmtop.profiler.snapshots.blocks import BlockSummary, summarise_blocks
from llmtop.profiler.units import format_bytes

MOST_BYTES = 1024**3
_PROTOCOL = 4
"""memory_viz reads no later one."""
_MOST_EVENTS = 200_000
"""With stacks each is kept with its frames: a few kilobytes."""


class SnapshotTooLarge(Exception):
    """The file would be larger than is allowed."""


class _Bounded:
    """A file that takes so many bytes and no more."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MOST_BYTES

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise SnapshotTooLarge(f"it would be larger than {format_bytes(MOST_BYTES)}")
        written: int = self._file.write(data)
        return written


@contextmanager
def stacks_recorded() -> Iterator[None]:
    """Allocations are kept with their Python stacks, and frees without.

    torch 2.11 drops the exception under way when it gathers a stack (pytorch/pytorch#179536, mended by
    #175196), and a recomputation that stops early ends by one, which frees tensors: on an H200 the step that
    was recorded died of it. So frees get no stack, and that step's recomputations run to their end.

    Not for weights in shards: DeepSpeed gathers a module's in the backward pass before its recomputation
    begins, and one that runs to its end lets go of them again, so that the backward pass finds them empty
    (0.19.8, on an H200). Such a training is refused stacks.
    """
    with set_checkpoint_early_stop(False):
        cuda_memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)
        try:
            yield
        finally:
            cuda_memory._record_memory_history(None)


def snapshot() -> dict[str, Any]:
    found: dict[str, Any] = cuda_memory._snapshot()
    return found


def reduced(
    engine: Any, found: dict[str, Any], *, device: torch.device, rank: int, step: int
) -> BlockSummary:
    """By the storages that the engine has now: to be called where the snapshot was taken."""
    index = torch.cuda.current_device() if device.index is None else device.index
    named = classify(engine, on_cpu=False).storages
    return summarise_blocks(
        found,
        ((one.address, one.size_bytes, str(one.component)) for one in named),
        device=index,
        rank=rank,
        step=step,
    )


def write_pickle(found: dict[str, Any], path: Path) -> None:
    """Whole or not at all. Raises OSError, or SnapshotTooLarge."""
    aside = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump(found, _Bounded(file), protocol=_PROTOCOL)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
