"""What a snapshot will take, said before it is taken, and why one is not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from msgspec import Struct

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotParams
from llmtop.profiler.units import format_bytes, format_seconds

MOST_STEPS = 50
_LAYER_EVENTS = 600
"""Of a trace, for a layer and a micro-batch, both ways; a GPU's kernels and launches are as many again."""
_STEP_EVENTS = 3000
"""Around the layers: head, loss, optimizer, collectives."""
_EVENT_RAW_BYTES = 400
_EVENT_KEPT_BYTES = 35
_EVENT_SECONDS = 25e-6
"""To stop the recording and write it, while the rank stands still; measured on the CPU kind, as the sizes."""
_LAYER_BLOCKS = 80
"""Of the allocator, at the end of a forward pass."""
_BLOCK_BYTES = 250
_STACK_BYTES = 4_000
_MODULES_BYTES = 20_000
ROOM_BYTES = 256 * 1024**2
"""That a disk keeps free: the record of the run itself must go on."""


class SnapshotCost(Struct, frozen=True, kw_only=True):
    """By rule of thumb, of all ranks together where it is bytes."""

    kept_bytes: int
    aside_bytes: int
    """For a while, beside what is kept."""
    stall_seconds: float
    """That the training stands still."""

    @property
    def in_words(self) -> str:
        words = f"about {format_bytes(self.kept_bytes)}"
        if self.aside_bytes:
            words += f" (and {format_bytes(self.aside_bytes)} while it is written)"
        return f"{words}; the training stands still for about {format_seconds(self.stall_seconds)}"


def estimate_snapshot(spec: RunSpec, params: SnapshotParams) -> SnapshotCost:
    layers, micro_batches, ranks = spec.model.num_layers, spec.options.grad_accum, len(params.ranks)
    sides = 1 if spec.on_cpu else 2
    events = sides * params.steps * (_STEP_EVENTS + micro_batches * layers * _LAYER_EVENTS)
    if params.what == "trace":
        return SnapshotCost(
            kept_bytes=ranks * events * _EVENT_KEPT_BYTES,
            aside_bytes=ranks * events * _EVENT_RAW_BYTES,
            stall_seconds=events * _EVENT_SECONDS,
        )
    if params.what == "modules":
        return SnapshotCost(kept_bytes=ranks * _MODULES_BYTES, aside_bytes=0, stall_seconds=0.01)
    size = layers * _LAYER_BLOCKS * (_BLOCK_BYTES + (_STACK_BYTES if params.with_stacks else 0))
    if params.with_stacks:
        size += layers * micro_batches * _LAYER_EVENTS // 4 * _STACK_BYTES
    return SnapshotCost(kept_bytes=ranks * size, aside_bytes=0, stall_seconds=0.1 + size / 50e6)


STACKS_END_IT = (
    "its backward pass would fail: while torch gathers stacks, a recomputation cannot stop early, and at"
    " ZeRO-3 one that runs to its end frees weights that the backward pass still needs"
)
"""pytorch/pytorch#179536, and `probes.snapshotmemory.stacks_recorded`. Not of reentrant recomputations."""


def check_snapshot(
    run: RunDir,
    spec: RunSpec,
    params: SnapshotParams,
    *,
    last_step: int,
    world_size: int | None = None,
) -> None:
    """Raises UsageError or LlmtopError where it cannot be taken from the run, which is at `last_step`.

    `world_size`: of a script that has told how many its ranks are before the rest of it is known.
    """
    if spec.script is not None and last_step == 0:
        raise UsageError(
            "nothing that trains has been seen in the command yet",
            why="a snapshot is of steps, and of a command of your own those that llmtop watches",
            fix="ask again when llmtop attach shows a step; where its processes stand: llmtop stacks",
        )
    _check_ranks(params.ranks, world_size or spec.world_size)
    if params.what == "state" and spec.on_cpu:
        raise UsageError(
            "a run on the CPU has no memory snapshot",
            why="it is what CUDA's allocator holds, and there is none",
            fix="memory by component: llmtop report; by module: llmtop snapshot RUN --what modules",
        )
    if params.with_stacks and params.what != "state":
        raise UsageError("stacks belong to a memory snapshot", fix="use --what state --with-stacks")
    options = spec.options
    # A command of the user's own is judged by its ranks, who see its modules.
    stops_early = options.gradient_checkpointing and not options.checkpointing_reentrant
    if params.with_stacks and options.zero == 3 and stops_early and spec.script is None:
        raise UsageError(
            "a snapshot with stacks would end this training",
            why=STACKS_END_IT,
            fix="the same without stacks: llmtop snapshot RUN --what state; or train with"
            " --checkpointing-reentrant",
        )
    # When a command of the user's own ends, it alone knows.
    _check_steps(params, None if spec.script else spec.options.steps, last_step)
    cost = estimate_snapshot(spec, params)
    needed, free = cost.kept_bytes + cost.aside_bytes + ROOM_BYTES, shutil.disk_usage(run.path).free
    if free < needed:
        raise LlmtopError(
            "the disk has no room for it",
            why=f"{run.path} has {format_bytes(free)} free; with a reserve it takes {format_bytes(needed)}",
            fix="free some space, or ask for fewer ranks or steps",
        )


def _check_ranks(ranks: Sequence[int], world_size: int) -> None:
    unknown = [rank for rank in ranks if not 0 <= rank < world_size]
    if unknown:
        raise UsageError(
            f"there is no rank {unknown[0]}",
            fix=f"use 0 to {world_size - 1}" if world_size > 1 else "its only rank is 0",
        )
    if not ranks or len(set(ranks)) != len(ranks):
        raise UsageError("no rank is named, or one twice", fix="name each once: --ranks 0,1")


def _check_steps(params: SnapshotParams, run_steps: int | None, last_step: int) -> None:
    step, steps = params.step, params.steps
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"{steps} steps cannot be looked at", fix=f"use 1 to {MOST_STEPS}")
    if params.what != "trace" and steps != 1:
        raise UsageError(f"{params.what} is of one step", fix="leave --steps out, or use --what trace")
    if step < 0:
        raise UsageError(f"there is no step {step}", fix="leave --step out")
    if step and step <= last_step:
        raise UsageError(
            f"step {step} is over", why=f"the run is at step {last_step}", fix="leave --step out"
        )
    last = (step or last_step + 1) + steps - 1
    if run_steps is not None and last > run_steps:
        raise UsageError(
            f"the run has no step {last}", why=f"it ends with step {run_steps}", fix="ask for earlier ones"
        )
