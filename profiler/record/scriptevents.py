"""Events of a training command of the user's own: what was found in its processes, and what that means."""

from typing import Any, Literal

from msgspec import Struct

from llmtop.presets.ranks import WorldSize
from llmtop.profiler.record.eventbase import Event

HOOKED_RUN = "LLMTOP_SCRIPT_RUN"
"""In the environment of a script: the folder of the run that watches. The hook does nothing without it; its
`sitecustomize` has the name once more, because it imports nothing."""


class FoundModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the modules and the optimizer of a script are. None: could not be told."""

    precision: str | None = None
    """`fp32`, `fp16` or `bf16`, of most weights; with autocast that of the arithmetic."""
    attention: str | None = None
    optimizer: str | None = None
    """As an option of llmtop; None for one that has none."""
    liger_kernels: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    checkpointing_reentrant: bool = False
    lora_rank: int = 0
    lora_targets: str = ""
    quantization: str | None = None


class RankAttached(Event, frozen=True, kw_only=True, tag="rank_attached"):
    """A process of a script is watched from here on: it has an engine or an optimizer."""

    pid: int
    world_size: WorldSize
    framework: Literal["deepspeed", "torch"]
    """`deepspeed`: an engine; `torch`: a torch optimizer without one."""
    deepspeed: dict[str, Any] | None = None
    """The engine's own configuration."""
    hf_config: dict[str, Any] | None = None
    """Of the model; None where it has none."""
    found: FoundModel | None = None


class BatchSeen(Event, frozen=True, kw_only=True, tag="batch_seen"):
    """The largest micro-batch of a script so far: what its memory must be predicted for."""

    step: int
    micro_batch: int
    """Sequences."""
    seq_len: int
    grad_accum: int = 1


class RankDetached(Event, frozen=True, kw_only=True, tag="rank_detached"):
    """A script's process is not watched any more, and goes on as if it had never been."""

    reason: str
    step: int = 0


class DevicesFound(Event, frozen=True, kw_only=True, tag="devices_found"):
    """Written by the supervisor of a command whose launch had no answer of the GPUs' driver: from here on the
    run's spec names its GPUs."""

    setting: int


class RunDescribed(Event, frozen=True, kw_only=True, tag="run_described"):
    """Written by the supervisor: from here on the run's spec and prediction are those of what was seen."""

    setting: int | None = None
    """None where no prediction can be made."""
    problem: str = ""
    """Why not, in words."""
