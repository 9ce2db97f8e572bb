"""What packing a model has cost: bytes, errors and perplexity, as it is kept beside the file and in a run."""

from __future__ import annotations

from msgspec import Struct

SUFFIX = ".quantized.json"
"""Of the report beside an output."""


class TensorError(Struct, frozen=True, kw_only=True):
    """How far one tensor's numbers moved."""

    name: str
    """In the source."""
    kind: str
    """What it is stored as."""
    size_bytes: int
    relative_rms: float | None
    """Root of the summed squares of what changed, over that of the numbers; None for a tensor of zeros."""


class Perplexity(Struct, frozen=True, kw_only=True):
    """Of the same tokens, by the source and by what came out."""

    before: float
    after: float
    tokens: int
    """Scored; the first of each window is not."""
    window: int
    """Tokens that are read together."""
    text: str
    """Where they came from."""
    cut_by_time: bool
    """Whether the time limit ended before the text did."""
    dtype: str
    """That both were computed in."""
    seconds: float
    peak_host_bytes: int | None = None
    """Memory of the process that measured, without the files that it reads."""

    @property
    def change(self) -> float:
        """Of the logarithm, in nats a token: what each token is surer or less sure by."""
        import math

        return math.log(self.after / self.before)


class Quantized(Struct, frozen=True, kw_only=True):
    """One file or folder that was made."""

    schema_version: int = 1
    source: str
    """A folder, or a run's id."""
    step: int | None = None
    """Of the run, whose state it was made from."""
    form: str
    """In the words of `--to`."""
    output: str
    model: str
    family: str
    parameters: int
    before_bytes: int
    """Of the source's tensors."""
    predicted_bytes: int
    """Of the output's tensors, by arithmetic."""
    tensor_bytes: int
    """Of the output's tensors, as written."""
    file_bytes: int
    """With metadata, vocabulary and padding, all files."""
    context: int
    """Tokens that `load_bytes` counts keys and values for."""
    load_bytes: int
    """Predicted: what a GPU needs to load it and be asked."""
    fits_on: tuple[str, ...]
    """The smallest GPUs with so much memory, the smallest first."""
    errors: tuple[TensorError, ...]
    """The worst first."""
    perplexity: Perplexity | None = None
    no_perplexity: str = ""
    """Why there is none."""
    seconds: float
    """Of packing alone."""
    peak_host_bytes: int | None
    """Memory of the process that packed, without the files that it reads."""
    notes: tuple[str, ...] = ()

    @property
    def relative_rms(self) -> float | None:
        """The largest of a tensor."""
        return self.errors[0].relative_rms if self.errors else None
