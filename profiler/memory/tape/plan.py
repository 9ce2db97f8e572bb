"""What a simulated engine goes by: weights, and the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class StepRules(Struct, frozen=True):
    """What the optimizer of a run makes."""

    moment_bytes: float
    """Of an element, in each of the two moments (0: none on the device)."""
    scale_bytes: float
    """Of an element, in each of the two tables of scales beside 8-bit moments."""
    temporary_bytes: int
    """Of an element, for the optimizer's own arithmetic."""
    fused: bool
    """DeepSpeed's own Adam, which stage 0 gives flat tensors."""

    @property
    def state_widths(self) -> tuple[float, ...]:
        """Bytes of an element in each tensor that the optimizer keeps of a weight."""
        both = (self.moment_bytes, self.moment_bytes, self.scale_bytes, self.scale_bytes)
        return tuple(width for width in both if width)


class GatherRules(Struct, frozen=True):
    """Of stage 3, in elements."""

    max_live: int
    max_reuse: int
    prefetch_bucket: int
    persistent: int
    """Tensors of at most this size are never sharded."""


class Plan(Struct, frozen=True):
    """The weights and settings that the engine goes by. Elements, unless it says bytes."""

    stage: int
    ranks: int
    width: int
    trained: Sequence[int]
    """Elements of each trained tensor, in the model's order."""
    tied: bool
    packed: bool
    """The base weights are kept in 4 or 8 bits."""
    frozen_bytes: Sequence[int]
    """Of each frozen tensor, as stored."""
    rank: int
    share: int
    """Trained elements of a rank's share."""
    bucket: int
    overlap: bool
    offloaded: bool
    params_away: bool
    """Weights lie on the host."""
    accumulating: bool
    contiguous: bool
    sub_group: int
    rules: StepRules
    gathering: GatherRules
