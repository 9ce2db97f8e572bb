"""Tiny real runs to do harm to, forked from a process that has the libraries: hundreds are affordable."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, Machine, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir

GIVE_UP_SECONDS = 180.0
_PAUSE_SECONDS = 0.01
KEPT_CHECKPOINTS = 3
CHECKPOINT_EVERY = 4


def tiny_spec(**options: Any) -> RunSpec:
    """Two ranks on the CPU, a checkpoint every fourth step, three of them kept; it never ends by itself."""
    values = {
        "gpus": 2,
        "zero": 2,
        "seq_len": 32,
        "micro_batch": 2,
        "threads_per_rank": 1,
        "steps": 1_000_000,
        "checkpoint_every": CHECKPOINT_EVERY,
        "keep_checkpoints": KEPT_CHECKPOINTS,
        "kernel_profile_step": 0,
        "warmup_steps": 0,
        "sample_seconds": 0.1,
        **options,
    }
    layers = [*recipe_layers(load_recipe("cpu-demo")), Layer(ValueSource.MACHINE, "", values)]
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=1 << 36)
    return replace(resolve(layers, name="harm", machine=machine), name="harm")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = GIVE_UP_SECONDS) -> None:
    """Raises TimeoutError that says what did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:g} s")
        time.sleep(_PAUSE_SECONDS)


def rank_pids(run: RunDir) -> dict[int, int]:
    """Of the ranks that the record knows and that have not ended."""
    ranks = read_state(run).ranks
    return {
        number: rank.pid for number, rank in ranks.items() if rank.pid is not None and rank.exited is None
    }


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
