"""Trials of one setting taken together, and how sure the time of it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from llmtop.trainer.tune.journal import Line
from llmtop.trainer.tune.rank import Tried
from llmtop.trainer.tune.space import Candidate, Space, key_of

SURE = 2.0
"""Standard errors of a difference, from which on it counts."""
MOST_RUNS = 3
"""Of one setting: more of them tell little that these did not."""


def pooled(lines: Iterable[Line]) -> list[Line]:
    """A line for each setting, in the order of first trials, its time that of all its runs together.

    A setting that failed once is no answer, so its failure is what counts.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(key_of(line.choice), []).append(line)
    return [_together(group) for group in groups.values()]


def _together(group: Sequence[Line]) -> Line:
    failed = next((line for line in group if line.step_seconds is None), None)
    if failed is not None or len(group) == 1:
        return failed or group[0]
    steps = sum(line.steps_measured for line in group)
    shares = [line.steps_measured / steps for line in group]
    means = [line.step_seconds or 0.0 for line in group]
    seconds = sum(share * mean for share, mean in zip(shares, means, strict=True))
    within = math.hypot(*(s * (one.error_seconds or 0.0) for s, one in zip(shares, group, strict=True)))
    between = statistics.stdev(means) / math.sqrt(len(means))
    peaks = [line.peak_bytes for line in group if line.peak_bytes is not None]
    return replace(
        group[0],
        step_seconds=seconds,
        spread_seconds=math.sqrt(
            sum(share * (one.spread_seconds or 0.0) ** 2 for share, one in zip(shares, group, strict=True))
        ),
        error_seconds=max(within, between),
        steps_measured=steps,
        runs=len(group),
        tokens_per_second=statistics.harmonic_mean(
            [line.tokens_per_second or 0.0 for line in group], weights=shares
        ),
        peak_bytes=max(peaks, default=None),
        wall_seconds=round(sum(line.wall_seconds for line in group), 2),
    )


def fastest(lines: Iterable[Line]) -> list[Line]:
    """Those with a time, the fastest first."""
    return sorted((line for line in lines if line.step_seconds), key=lambda line: line.step_seconds or 0.0)


def apart(faster: Line, slower: Line) -> bool:
    """Whether the difference of two times is more than they scatter."""
    gap = (slower.step_seconds or 0.0) - (faster.step_seconds or 0.0)
    return gap >= SURE * math.hypot(faster.error_seconds or 0.0, slower.error_seconds or 0.0)


def doubtful(lines: Iterable[Line]) -> Line | None:
    """Of the two fastest the one to be tried again, where which of them is faster is not sure yet."""
    two = fastest(pooled(lines))[:2]
    if len(two) < 2 or apart(*two):
        return None
    open_ = [line for line in two if line.runs < MOST_RUNS]
    return min(open_, key=lambda line: (line.runs, -(line.error_seconds or 0.0)), default=None)


def tried_of(lines: Iterable[Line], space: Space) -> list[Tried]:
    """Settings as the ranking has them; those that the space no longer holds are left out."""
    known: dict[str, Candidate] = {one.key: one for one in space.candidates}
    found = []
    for line in pooled(lines):
        candidate = known.get(key_of(line.choice))
        if candidate is not None and line.outcome is not None:
            found.append(Tried(candidate=candidate, outcome=line.outcome, step_seconds=line.step_seconds))
    return found
