"""Others' estimates beside ours on the rows that each has an answer for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from benchmarks.accuracy.estimates import (
    CLOSED_FORMS,
    DEEPSPEED,
    MEMTRACKER,
    RIVALS,
    Estimate,
    Rival,
    deepspeed_estimates,
)
from benchmarks.accuracy.goals import Spread, spread
from benchmarks.accuracy.memtracker import known
from benchmarks.accuracy.score import Score, percent
from benchmarks.cells import plan
from benchmarks.rows import key_of
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec


class Compared(Struct, frozen=True, kw_only=True):
    """One rival over all rows; `ours` is over the rows that it answers."""

    rival: Rival
    rows: int
    errors: Spread | None
    underestimated: float
    """Share of its answers that are below what was measured."""
    ours: Spread | None
    ours_underestimated: float
    percents: tuple[float, ...]
    silent: tuple[tuple[str, int], ...]
    """Reasons for having no answer, most frequent first."""


def compared(scores: Sequence[Score]) -> list[Compared]:
    specs = [_spec(score) for score in scores]
    tracked = known()
    estimates = {name: [form(spec) for spec in specs] for name, form in CLOSED_FORMS.items()}
    estimates[DEEPSPEED.name] = deepspeed_estimates(specs)
    untried = Estimate(reason="not tried yet")
    estimates[MEMTRACKER.name] = [tracked.get(key_of(score.cell), untried) for score in scores]
    return [_compared(rival, scores, estimates[rival.name]) for rival in RIVALS]


def _spec(score: Score) -> RunSpec:
    cell = score.cell
    machine = Machine(gpu="h200", gpus=cell.get("gpus", 1), host_memory_bytes=None)
    return plan({"gpu": "h200", **cell}, machine, name="compared").spec


def _compared(rival: Rival, scores: Sequence[Score], estimates: Sequence[Estimate]) -> Compared:
    answered = [
        (percent(said.bytes, score.measured_peak_bytes), score.peak_percent)
        for score, said in zip(scores, estimates, strict=True)
        if said.bytes is not None
    ]
    theirs, ours = [each for each, _ in answered], [each for _, each in answered]
    silent = Counter(said.reason for said in estimates if said.bytes is None)
    return Compared(
        rival=rival,
        rows=len(scores),
        errors=spread(theirs),
        underestimated=_below(theirs),
        ours=spread(ours),
        ours_underestimated=_below(ours),
        percents=tuple(theirs),
        silent=tuple(silent.most_common()),
    )


def _below(percents: Sequence[float]) -> float:
    return sum(each < 0 for each in percents) / len(percents) if percents else 0.0
