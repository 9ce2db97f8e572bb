"""The search: starting setting first, then whatever the corrected ranking promises most, until a budget ends.

Every trial is in the journal before the next begins, so that a search goes on where it was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import changed
from llmtop.profiler.record.rundir import list_runs
from llmtop.trainer.tune.journal import Line, TuneDir, tried_of
from llmtop.trainer.tune.rank import Tried, fastest_first, next_candidate, untried
from llmtop.trainer.tune.space import Candidate, Space, choice_of, key_of
from llmtop.trainer.tune.trial import Measured, Show, end_run, run_trial, trial_spec

LONGEST_SECONDS = 120.0
"""Of one trial, start-up included."""
_LEAST_SECONDS = 10.0
"""With less left of the budget no trial is begun."""
_LEAST_FOR_FIRST_SECONDS = 60.0


class Teller(Protocol):
    """Who shows a search while it goes on."""

    def began(self, number: int, candidate: Candidate) -> None: ...

    def show(self, number: int, candidate: Candidate) -> Show: ...

    def ended(self, line: Line) -> None: ...


Carry = Callable[[RunSpec, float, float | None, Show], Measured]
"""Carries out a trial: its run, its seconds, the best time of a step so far, who is shown it."""


def start_candidate(spec: RunSpec, space: Space) -> Candidate | None:
    """The setting that a person began with, where it can be tried."""
    key = key_of(choice_of(spec, space.knobs))
    return next((one for one in space.candidates if one.key == key), None)


class Search:
    def __init__(
        self, tune: TuneDir, spec: RunSpec, space: Space, teller: Teller, carry: Carry | None = None
    ) -> None:
        self._tune = tune
        self._spec = spec
        self._space = space
        self._teller = teller
        self._carry = carry or self._real

    def run(self, trials: int, minutes: float) -> str:
        """Until so many trials are in the journal, or this call has lasted so long; why it ended."""
        self._end_left_over()
        deadline = time.monotonic() + 60 * minutes
        while True:
            lines = self._tune.ended()
            tried = tried_of(lines, self._space)
            if len(lines) >= trials:
                return f"{len(lines)} trials were made"
            left = deadline - time.monotonic()
            if left < _LEAST_SECONDS and lines:
                return f"{minutes:g} minutes are over"
            candidate = self._next(tried)
            if candidate is None:
                return "nothing is left that was not tried and may fit"
            seconds = min(LONGEST_SECONDS, max(left, _LEAST_FOR_FIRST_SECONDS if not lines else 0))
            self._one(len(lines) + 1, candidate, seconds, tried)

    def _next(self, tried: list[Tried]) -> Candidate | None:
        """The starting setting, so that there is something to compare with; then the ranking's."""
        start = start_candidate(self._spec, self._space)
        if start is not None and start in untried(self._space.candidates, tried):
            return start
        return next_candidate(self._space.candidates, tried)

    def _one(self, number: int, candidate: Candidate, seconds: float, tried: list[Tried]) -> None:
        began = Line(
            event="began",
            number=number,
            choice=candidate.choice,
            change=candidate.change,
            at=time.time(),
            predicted_step_seconds=candidate.brief.step_seconds,
            needed_bytes=candidate.brief.needed_bytes,
        )
        self._tune.append(began)
        self._teller.began(number, candidate)
        run = trial_spec(changed(self._spec, candidate.change))
        best = next((t.step_seconds for t in fastest_first(tried)), None)
        try:
            got = self._carry(run, seconds, best, self._teller.show(number, candidate))
        except KeyboardInterrupt:
            self._tune.append(replace(began, event="interrupted", at=time.time()))
            raise
        line = _ended(began, got, run)
        self._tune.append(line)
        self._teller.ended(line)

    def _real(self, run: RunSpec, seconds: float, best: float | None, show: Show) -> Measured:
        return run_trial(run, self._tune.trials_root, seconds, best_step_seconds=best, show=show)

    def _end_left_over(self) -> None:
        """The run of a trial outlives a search that was killed, and would disturb the next."""
        for run in list_runs(self._tune.trials_root):
            end_run(run)


def _ended(began: Line, got: Measured, run: RunSpec) -> Line:
    return replace(
        began,
        event="ended",
        at=time.time(),
        run=got.run,
        outcome=got.outcome,
        reason=got.reason,
        step_seconds=got.step_seconds,
        spread_seconds=got.spread_seconds,
        steps_measured=got.steps_measured,
        tokens_per_second=run.tokens_per_step / got.step_seconds if got.step_seconds else None,
        peak_bytes=got.peak_bytes,
        wall_seconds=round(got.wall_seconds, 2),
    )
