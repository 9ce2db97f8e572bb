"""The largest micro-batch or sequence length that fits: from the prediction, then by real trials around it.

After each trial that fits, the prediction is scaled to the peak that it measured; one that does not fit is a
wall. The next trial is the scaled edge, or one step beyond what fits, so that fit and wall meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import judge
from llmtop.profiler.memory.predict import predict

Quantity = Literal["micro_batch", "seq_len"]
TRIALS = 3
LENGTH_STEP = 128
_MOST = 1 << 22
_FINEST = 64
"""A step is at least this fraction of the size: beyond, another one changes nothing that anybody feels."""


class Need(Struct, frozen=True, kw_only=True):
    """Memory of one size, as predicted."""

    peak_bytes: int
    upper_bytes: int
    """Peak by its upper bound."""
    outside_bytes: int
    """Beside the allocator."""


class Probe(Struct, frozen=True, kw_only=True):
    """A size that was tried."""

    size: int
    fitted: bool
    peak_bytes: int | None = None


def sized(spec: RunSpec, quantity: Quantity, size: int) -> RunSpec:
    """The run at a size. Two micro-batches a step hold as much as any more."""
    if quantity == "micro_batch":
        options = replace(spec.options, micro_batch=size, grad_accum=min(2, spec.options.grad_accum))
    else:
        options = replace(spec.options, seq_len=size)
    return replace(spec, options=options)


def need_of(spec: RunSpec, quantity: Quantity) -> Callable[[int], Need | None]:
    """Size to what it needs; None for a size that is refused, as one beyond the model's positions."""

    def need(size: int) -> Need | None:
        run = sized(spec, quantity, size)
        try:
            if isinstance(judge(run, {}), tuple):
                return None
        except UsageError:
            return None
        found = predict(run)
        upper_bytes = found.peak_allocated_upper_bytes
        return Need(
            peak_bytes=found.peak_allocated_bytes,
            upper_bytes=upper_bytes,
            outside_bytes=max(0, (found.needed_bytes or upper_bytes) - upper_bytes),
        )

    return need


def grain_of(quantity: Quantity) -> int:
    """Every size that is tried is a multiple of it."""
    return 1 if quantity == "micro_batch" else LENGTH_STEP


def step_of(quantity: Quantity, size: int) -> int:
    """The distance at which an edge counts as found: one micro-batch, 128 tokens, or 1/64 of more."""
    grain = grain_of(quantity)
    return max(grain, size // _FINEST // grain * grain)


def largest(fits: Callable[[int], bool], grain: int) -> int:
    """The largest multiple of `grain` for which it holds; 0 where it does for none. Monotone by nature."""
    low, high = 0, grain
    while high <= _MOST and fits(high):
        low, high = high, high * 2
    while high - low > grain:
        middle = (low + high) // 2 // grain * grain
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def predicted_edge(
    need: Callable[[int], Need | None], memory_bytes: int, grain: int, probes: Sequence[Probe] = ()
) -> int:
    """By the upper bound; once a peak was measured, by the prediction scaled to it."""
    scale: float | None = None
    for probe in probes:
        own = need(probe.size)
        if probe.fitted and probe.peak_bytes and own is not None and own.peak_bytes:
            scale = probe.peak_bytes / own.peak_bytes

    def fits(size: int) -> bool:
        found = need(size)
        if found is None:
            return False
        allocated_bytes = found.upper_bytes if scale is None else found.peak_bytes * scale
        return allocated_bytes + found.outside_bytes <= memory_bytes

    return largest(fits, grain)


def _bounds(probes: Sequence[Probe]) -> tuple[int | None, int | None]:
    """The largest size that fitted, and the smallest that did not."""
    return (
        max((probe.size for probe in probes if probe.fitted), default=None),
        min((probe.size for probe in probes if not probe.fitted), default=None),
    )


def next_size(
    need: Callable[[int], Need | None], memory_bytes: int, quantity: Quantity, probes: Sequence[Probe]
) -> int | None:
    """What to try; None when the edge is known to a step, or there is nothing to try."""
    grain = grain_of(quantity)
    largest_fitted, wall = _bounds(probes)
    fitted = largest_fitted or 0
    guess = predicted_edge(need, memory_bytes, grain, probes)
    step = step_of(quantity, max(fitted, guess))
    if wall is not None and wall - fitted <= step:
        return None
    guess = guess if guess > fitted else fitted + step
    if wall is not None and guess >= wall:
        if fitted:
            guess = max(fitted + grain, (fitted + wall) // 2 // grain * grain)
        else:
            # The bound is rarely beyond by much; where it is, the last trial had better fit.
            walls = sum(not probe.fitted for probe in probes)
            guess = wall - max(step, wall // (32 if walls == 1 else 4) // grain * grain)
    return guess if guess > 0 and need(guess) is not None else None


class Edge(Struct, frozen=True, kw_only=True):
    """The answer of `tune --max-batch` and `--max-length`."""

    quantity: Quantity
    largest: int
    """0: not even the smallest fits."""
    source: Literal["measured", "predicted"]
    exact: bool
    """Whether the next step up was seen not to fit."""
    predicted: int
    step: int
    probes: tuple[Probe, ...] = ()
    words: str = ""


def edge_of(
    need: Callable[[int], Need | None],
    memory_bytes: int,
    quantity: Quantity,
    probe: Callable[[int], Probe | None] | None,
) -> Edge:
    """Predict, then try at most `TRIALS` sizes. `probe` gives None for a trial that tells nothing."""
    grain = grain_of(quantity)
    predicted = predicted_edge(need, memory_bytes, grain)
    probes: list[Probe] = []
    while probe is not None and len(probes) < TRIALS:
        size = next_size(need, memory_bytes, quantity, probes)
        tried = None if size is None else probe(size)
        if tried is None:
            break
        probes.append(tried)
    fitted, wall = _bounds(probes)
    size = fitted if fitted is not None else min(predicted, (wall or predicted + grain) - grain)
    step = step_of(quantity, size)
    refused_beyond = size > 0 and need(size + step) is None
    exact = fitted is not None and (refused_beyond or (wall is not None and wall - fitted <= step))
    return Edge(
        quantity=quantity,
        largest=size,
        source="measured" if fitted is not None else "predicted",
        exact=exact,
        predicted=predicted,
        step=step,
        probes=tuple(probes),
    )
