"""What is said between the command that packs a model and the processes that do it (`trainer.elsewhere`)."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.quantized import Perplexity, TensorError
from llmtop.trainer.elsewhere import Failed


class PackJob(Struct, frozen=True, kw_only=True, tag="pack"):
    """Make the file or folder."""

    source: str
    form: str
    target: str
    """Not there yet."""


class MeasureJob(Struct, frozen=True, kw_only=True, tag="measure"):
    """Perplexity of the source and of what was made of it."""

    source: str
    form: str
    made: str
    text: str
    """A file; empty: the text that comes with llmtop."""
    window: int
    seconds: float
    """The most that each of the two may take."""
    dtype: str
    """float32 or bfloat16."""


class Working(Struct, frozen=True, kw_only=True, tag="working"):
    """How far it is."""

    doing: str
    done: int
    total: int


class Packed(Struct, frozen=True, kw_only=True, tag="packed"):
    tensor_bytes: int
    errors: tuple[TensorError, ...]
    peak_host_bytes: int | None
    seconds: float
    notes: tuple[str, ...] = ()


class Measured(Struct, frozen=True, kw_only=True, tag="measured"):
    perplexity: Perplexity


Job = PackJob | MeasureJob
Answer = Working | Packed | Measured | Failed
