"""Which setting to try next: the prediction, corrected by what the trials so far have shown.

The correction is a factor on the predicted time, learnt as ridge regression of log(measured / predicted)
on which value each knob has, in its dual form: values that a candidate shares with a trial make it move with
that trial, and what no trial has shared stays uncertain. The next trial is the candidate with the most
expected improvement over the best so far.

Why not Optuna: its samplers know nothing of the prediction. TPE draws its first ten trials at random, which
is the whole of a search of twelve, and a Gaussian process without our prediction as its mean has to learn
first what is known already. This is one linear system of a dozen rows, without a dependency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

from msgspec import Struct

from llmtop.trainer.tune.space import BUCKETS, Candidate

Outcome = Literal["measured", "out_of_memory", "failed", "timeout", "slow"]
"""`slow`: ended early because it was behind the best by far; its time counts as measured."""

_COMMON_VARIANCE = 1.0
"""Of what all predictions are off by together: on the CPU their scale is not known at all."""
_KNOB_VARIANCE = 0.02
"""Of what one value of a knob is off by: 14 %."""
_OWN_VARIANCE = 0.0004
"""Of what a combination is off by beyond that."""
_NOISE_VARIANCE = 0.0001
_MICRO_SCALE = 1.5
"""Doublings of the micro-batch over which a correction carries."""
_SUSPICION = 0.3
"""Taken from a candidate's chances, in log time, for each failure of a value that never worked."""
_BOUND_STEP = 1.02
"""By how much an out-of-memory raises what its like are taken to need, beyond what there was."""
_LIKE_IGNORES = ("micro_batch", BUCKETS)
"""Knobs in which candidates may differ and still be alike in memory."""
_OFFLOADS = ("offload_optimizer", "offload_param")


class Tried(Struct, frozen=True, kw_only=True):
    """What a ranking needs to know of a trial."""

    candidate: Candidate
    outcome: Outcome
    step_seconds: float | None = None


def next_candidate(candidates: Sequence[Candidate], trials: Sequence[Tried]) -> Candidate | None:
    """The one to try; None when nothing is left that has not been tried and may fit."""
    return max(untried(candidates, trials), key=_worth(trials), default=None)


def ranked(candidates: Sequence[Candidate], trials: Sequence[Tried]) -> list[Candidate]:
    """What has not been tried and may fit, the most promising first."""
    return sorted(untried(candidates, trials), key=_worth(trials), reverse=True)


def _worth(trials: Sequence[Tried]) -> Callable[[Candidate], tuple[float, float]]:
    """How much a candidate promises: the more the better."""
    model = Correction(trials)
    doubts = suspicion(trials)
    best = min((math.log(t.step_seconds) for t in trials if t.step_seconds), default=None)

    def worth(one: Candidate) -> tuple[float, float]:
        mean, deviation = model.predict(one)
        mean += _SUSPICION * sum(doubts.get((key, value), 0) for key, value in one.choice.items())
        if best is None:
            return -mean, -one.cost_seconds
        return expected_improvement(best, mean, deviation), -mean

    return worth


def may_fit(candidates: Sequence[Candidate], trials: Sequence[Tried]) -> list[Candidate]:
    """What has not been tried, and may fit by all that is known."""
    done = {trial.candidate.key for trial in trials}
    raised = memory_factors(trials)
    return [one for one in candidates if one.key not in done and not _now_too_large(one, raised)]


def untried(candidates: Sequence[Candidate], trials: Sequence[Tried]) -> list[Candidate]:
    """The same without what moves to the host a thing that may stay on the device, all else alike.

    Offload only makes room: it is worth a trial where the setting without it does not fit or does not work.
    """
    left = may_fit(candidates, trials)
    better = {_pairs(one.choice) for one in left}
    better |= {_pairs(trial.candidate.choice) for trial in trials if trial.step_seconds is not None}
    return [one for one in left if not any(_pairs(twin) in better for twin in _with_less_offload(one))]


def _pairs(choice: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset(choice.items())


def _with_less_offload(one: Candidate) -> Iterator[dict[str, Any]]:
    moved = [key for key in _OFFLOADS if one.choice.get(key, "none") != "none"]
    for count in range(1, len(moved) + 1):
        for keys in combinations(moved, count):
            yield {**one.choice, **dict.fromkeys(keys, "none")}


def memory_factors(trials: Sequence[Tried]) -> dict[tuple[tuple[str, Any], ...], float]:
    """For each kind of candidate that ran out of memory: how much more than predicted its like need."""
    factors: dict[tuple[tuple[str, Any], ...], float] = {}
    for trial in trials:
        brief = trial.candidate.brief
        if trial.outcome != "out_of_memory" or not brief.needed_bytes:
            continue
        limit = brief.device_memory_bytes or brief.needed_bytes
        kind = _kind(trial.candidate)
        factor = max(1.0, limit / brief.needed_bytes) * _BOUND_STEP
        # It failed, so the smallest that failed decides.
        factors[kind] = max(factors.get(kind, 1.0), factor)
    return factors


def _kind(candidate: Candidate) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((k, v) for k, v in candidate.choice.items() if k not in _LIKE_IGNORES))


def _now_too_large(candidate: Candidate, raised: dict[tuple[tuple[str, Any], ...], float]) -> bool:
    factor = raised.get(_kind(candidate))
    needed, limit = candidate.brief.needed_bytes, candidate.brief.device_memory_bytes
    return factor is not None and needed is not None and limit is not None and needed * factor > limit


def suspicion(trials: Sequence[Tried]) -> dict[tuple[str, Any], int]:
    """How often each value failed, for those that never worked. An out-of-memory is no failure of a value."""
    worked = {pair for t in trials if t.step_seconds is not None for pair in t.candidate.choice.items()}
    counts: dict[tuple[str, Any], int] = {}
    for trial in trials:
        if trial.outcome in ("failed", "timeout") and trial.step_seconds is None:
            for pair in trial.candidate.choice.items():
                if pair not in worked:
                    counts[pair] = counts.get(pair, 0) + 1
    return counts


def expected_improvement(best: float, mean: float, deviation: float) -> float:
    """Of a minimum, in log seconds."""
    if deviation <= 0:
        return max(0.0, best - mean)
    z = (best - mean) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return (best - mean) * 0.5 * (1 + math.erf(z / math.sqrt(2))) + deviation * density


class Correction:
    """Predicted seconds of a step, corrected: a mean and a deviation of its logarithm."""

    def __init__(self, trials: Sequence[Tried]) -> None:
        self._seen = [trial.candidate for trial in trials if trial.step_seconds]
        off = [math.log(t.step_seconds / t.candidate.cost_seconds) for t in trials if t.step_seconds]
        size = len(self._seen)
        matrix = [
            [kernel(a, b) + (_NOISE_VARIANCE if i == j else 0.0) for j, b in enumerate(self._seen)]
            for i, a in enumerate(self._seen)
        ]
        self._lower = _cholesky(matrix)
        self._weights = _solve(self._lower, off) if size else []

    def predict(self, candidate: Candidate) -> tuple[float, float]:
        """Logarithm of the seconds, and how far off that may be."""
        shared = [kernel(candidate, seen) for seen in self._seen]
        shift = sum(k * w for k, w in zip(shared, self._weights, strict=True))
        half = _forward(self._lower, shared)
        variance = kernel(candidate, candidate) - sum(value * value for value in half)
        return math.log(candidate.cost_seconds) + shift, math.sqrt(max(0.0, variance))


def kernel(a: Candidate, b: Candidate) -> float:
    """How much of what one is off by the other is off by too."""
    total = _COMMON_VARIANCE + (_OWN_VARIANCE if a.key == b.key else 0.0)
    for key, value in a.choice.items():
        other = b.choice.get(key)
        if key == "micro_batch" and other:
            total += _KNOB_VARIANCE * math.exp(-((math.log2(value / other) / _MICRO_SCALE) ** 2))
        elif value == other:
            total += _KNOB_VARIANCE
    return total


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(max(rest, 1e-12)) if i == j else rest / lower[j][j]
    return lower


def _forward(lower: list[list[float]], right: Sequence[float]) -> list[float]:
    solved: list[float] = []
    for row, value in zip(lower, right, strict=True):
        solved.append((value - sum(a * b for a, b in zip(row, solved, strict=False))) / row[len(solved)])
    return solved


def _solve(lower: list[list[float]], right: Sequence[float]) -> list[float]:
    half = _forward(lower, right)
    size = len(lower)
    solved = [0.0] * size
    for i in reversed(range(size)):
        solved[i] = (half[i] - sum(lower[k][i] * solved[k] for k in range(i + 1, size))) / lower[i][i]
    return solved


def fastest_first(trials: Sequence[Tried]) -> Iterator[Tried]:
    """Those that were measured."""
    measured = [trial for trial in trials if trial.step_seconds is not None]
    yield from sorted(measured, key=lambda trial: trial.step_seconds or 0.0)
