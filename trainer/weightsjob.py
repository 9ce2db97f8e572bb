"""What is said between the command that takes weights out of a run and the process that does it.

`trainer.elsewhere` tells how.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from llmtop.presets.spec import Precision
from llmtop.trainer.elsewhere import Failed

Content = Literal["full", "merged", "adapters", "quantized"]
"""All weights as they are; the base with the adapters added to it; the adapters alone; the weights of a run
with fake quantization in the bits that it was trained for."""
Base = Literal["trained", "original"]
"""Of packed weights under adapters: their values after packing, which the adapters were trained on, or those
of the folder that they were packed from."""


class WeightsJob(Struct, frozen=True, kw_only=True):
    run: str
    """The run's folder."""
    state: str
    """The `step-N` folder."""
    target: str
    """An empty folder to be filled."""
    content: Content
    base: Base = "trained"
    dtype: Precision
    shard_bytes: int
    """The most that a file holds, unless one tensor alone is larger."""


class Writing(Struct, frozen=True, kw_only=True, tag="writing"):
    """How far it is."""

    written_bytes: int
    total_bytes: int


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    tensors: int
    parameters: int
    size_bytes: int
    """Of all files."""
    notes: tuple[str, ...] = ()
    """In words what whoever uses the folder should know."""


Answer = Writing | Finished | Failed
