"""What packing a model has cost, as lines for a terminal and for a run's report."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.profiler.quantized import Perplexity, Quantized, TensorError
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    counted,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)

_WORST = 5


def quantized_rows(made: Quantized, worst: int = _WORST) -> Iterator[tuple[str, str]]:
    """Name and text of each line; a name of blanks goes on with the one above."""
    yield "bytes", _bytes_words(made)
    yield "to load", load_words(made.load_bytes, made.context, made.fits_on)
    if made.perplexity is not None:
        yield "perplexity", perplexity_words(made.perplexity)
    else:
        yield "perplexity", f"{NOT_AVAILABLE}: {made.no_perplexity}"
    for at, error in enumerate(made.errors[:worst]):
        yield "error" if at == 0 else "", error_words(error) + (", the worst" if at == 0 else "")
    yield "took", f"{format_seconds(made.seconds)}, {format_bytes(made.peak_host_bytes)} of host memory"
    for note in made.notes:
        yield "note", note


def quantized_head(made: Quantized) -> str:
    step = "" if made.step is None else f", step {made.step:,}"
    return (
        f"{made.output}: {made.form} of {made.source}{step} ({made.family},"
        f" {format_count(made.parameters)} parameters)"
    )


def _bytes_words(made: Quantized) -> str:
    off = _off(made.predicted_bytes, made.tensor_bytes)
    return (
        f"{format_bytes(made.before_bytes)} before; {format_bytes(made.predicted_bytes)} predicted,"
        f" {format_bytes(made.tensor_bytes)} written ({off}); {format_bytes(made.file_bytes)} with vocabulary"
    )


def load_words(load_bytes: int, context: int, fits_on: tuple[str, ...]) -> str:
    gpus = (
        f"the smallest GPUs with that: {', '.join(fits_on)}" if fits_on else "no GPU of the presets has that"
    )
    return f"{format_bytes(load_bytes)} predicted with {context:,} tokens kept; {gpus}"


def error_words(error: TensorError) -> str:
    return f"{_percent(error.relative_rms)} relative RMS, {error.name} ({error.kind})"


def perplexity_words(found: Perplexity) -> str:
    cut = ", as far as time reached" if found.cut_by_time else ""
    change = format_percent(100 * (found.after / found.before - 1), signed=True, digits=2)
    return (
        f"{found.before:.4g} before, {found.after:.4g} after ({change}):"
        f" {counted(found.tokens, 'token')} of {found.text}{cut}, in windows of {found.window},"
        f" {found.dtype}"
    )


def _off(predicted: int, real: int) -> str:
    return format_percent(100 * (predicted / real - 1), signed=True, digits=2) if real else NOT_AVAILABLE


def _percent(part: float | None) -> str:
    return format_percent(None if part is None else 100 * part, digits=2)
