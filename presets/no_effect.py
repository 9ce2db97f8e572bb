"""Raw DeepSpeed keys that are accepted and change nothing in a run of this program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from llmtop.presets.truth import asks, is_true


class Idle(Struct, frozen=True, kw_only=True):
    """A raw key without effect."""

    path: str
    why: str
    instead: str
    source: str
    """Where it was read that nothing comes of it."""
    given: Callable[[Any], bool] = is_true
    """Whether a value asks for something."""
    one_node_only: bool = False
    """Over several nodes it has its effect."""


def _any_on(block: Any) -> bool:
    return isinstance(block, dict) and any(map(asks, block.values()))


IDLE: tuple[Idle, ...] = (
    Idle(
        path="zero_optimization.zero_quantized_gradients",
        why="on one node gradients go unquantized: only between nodes are they sent in fewer bits",
        instead="leave it out",
        source="deepspeed 0.19.8 runtime/zero/stage3.py:__avg_scatter_grads, num_nodes > 1",
        one_node_only=True,
    ),
    Idle(
        path="zero_optimization.allgather_partitions",
        why="DeepSpeed accepts it and reads it nowhere",
        instead="delete it",
        source="deepspeed 0.19.8 runtime/engine.py:zero_allgather_partitions has no caller",
        given=lambda value: value is not None,
    ),
    Idle(
        path="activation_checkpointing",
        why="it is read only by models that call deepspeed.checkpointing; Hugging Face models do not",
        instead="use --gradient-checkpointing",
        source="deepspeed 0.19.8 runtime/activation_checkpointing/checkpointing.py",
        given=_any_on,
    ),
    Idle(
        path="compile",
        why="it takes effect only where engine.compile() is called, and the training loop does not",
        instead="leave it out",
        source="deepspeed 0.19.8 runtime/engine.py:forward: compile() has not been called",
        given=_any_on,
    ),
    Idle(
        path="data_efficiency",
        why="it acts on DeepSpeed's own data loader and on layers that are converted for it;"
        " the training loop has neither",
        instead="leave it out",
        source="deepspeed 0.19.8 runtime/engine.py:deepspeed_io, random_ltd_initialize",
        given=lambda block: isinstance(block, dict) and is_true(block.get("enabled")),
    ),
    Idle(
        path="dataloader_drop_last",
        why="it is for DeepSpeed's own data loader, and the training loop has another",
        instead="leave it out",
        source="deepspeed 0.19.8 runtime/engine.py:deepspeed_io",
    ),
    Idle(
        path="disable_allgather",
        why="DeepSpeed accepts it and reads it nowhere",
        instead="delete it",
        source="deepspeed 0.19.8 runtime/config.py: its only mention",
    ),
)


def idle_keys(raw: dict[str, Any], *, nodes: int = 1) -> Iterator[Idle]:
    """Those among the raw keys that are given and without effect."""
    for idle in IDLE:
        value: Any = raw
        for key in idle.path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if idle.given(value) and not (idle.one_node_only and nodes > 1):
            yield idle
