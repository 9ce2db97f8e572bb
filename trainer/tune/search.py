"""The search: starting setting first, then whatever the corrected ranking promises most, until a budget ends.

The last trials go to the two fastest again where their times are too close to tell them apart. Every trial is
in the journal before the next begins, so that a search goes on where it was interrupted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import changed
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.profiler.units import counted
from llmtop.trainer.tune.interrupt import undisturbed
from llmtop.trainer.tune.journal import Line, TuneDir
from llmtop.trainer.tune.pool import doubtful, tried_of
from llmtop.trainer.tune.rank import Tried, fastest_first, may_fit, next_candidate
from llmtop.trainer.tune.space import Candidate, Space, choice_of, key_of
from llmtop.trainer.tune.trial import (
    Measured,
    Show,
    Start,
    end_run,
    finished_trial,
    run_trial,
    start_trial,
    trial_spec,
)

LONGEST_SECONDS = 120.0
"""Of one trial, start-up included."""
_LEAST_SECONDS = 10.0
"""With less left of the budget no trial is begun."""
_LEAST_FOR_FIRST_SECONDS = 60.0
_FINALS = 2
"""Trials at the end that are kept for telling the two fastest apart."""
_CLOCK_SECONDS = 1.0
"""By how much a file's time may be before the clock's."""


class Teller(Protocol):
    """Who shows a search while it goes on."""

    def began(self, line: Line) -> None: ...

    def show(self, line: Line) -> Show: ...

    def ended(self, line: Line) -> None: ...


Carry = Callable[[RunSpec, float, float | None, Show], Measured]
"""Carries out a trial: its run, its seconds, the best time of a step so far, who is shown it."""


class Next(Struct, frozen=True, kw_only=True):
    """What is to be tried."""

    candidate: Candidate
    again: bool = False
    """Whether it was tried before, and its time is not sure enough."""


def start_candidate(spec: RunSpec, space: Space) -> Candidate | None:
    """The setting that a person began with, where it can be tried."""
    key = key_of(choice_of(spec, space.knobs))
    return next((one for one in space.candidates if one.key == key), None)


def next_trial(spec: RunSpec, space: Space, lines: Sequence[Line], room: int) -> Next | None:
    """The starting setting, so that there is something to compare with; then the ranking's, or a final.

    `room` is how many trials may still be made.
    """
    tried = tried_of(lines, space)
    start = start_candidate(spec, space)
    if start is not None and start in may_fit(space.candidates, tried):
        return Next(candidate=start)
    following = next_candidate(space.candidates, tried)
    if room <= _FINALS or following is None:
        unsure = doubtful(lines)
        again = next((one for one in space.candidates if unsure and one.key == key_of(unsure.choice)), None)
        if again is not None:
            return Next(candidate=again, again=True)
    return Next(candidate=following) if following is not None else None


def _coming(
    spec: RunSpec, space: Space, lines: Sequence[Line], trials: int, minutes: float, left_seconds: float
) -> Next | str:
    """What is to be tried with so much left of a budget of `trials` and `minutes`, or why the search ends."""
    if len(lines) >= trials:
        return f"{counted(len(lines), 'trial')} {'was' if len(lines) == 1 else 'were'} made"
    if left_seconds < _LEAST_SECONDS and lines:
        return f"{minutes:g} minutes are over"
    following = next_trial(spec, space, lines, _room(lines, trials, left_seconds))
    return following or "nothing is left that was not tried and may fit"


def trial_left(spec: RunSpec, space: Space, lines: Sequence[Line], trials: int, minutes: float) -> bool:
    """Whether a search that goes on now would begin a trial; what ran when it was killed is not looked at."""
    return isinstance(_coming(spec, space, lines, trials, minutes, 60 * minutes), Next)


class Search:
    def __init__(
        self,
        tune: TuneDir,
        spec: RunSpec,
        space: Space,
        teller: Teller,
        carry: Carry | None = None,
        start: Start = start_trial,
    ) -> None:
        self._tune = tune
        self._spec = spec
        self._space = space
        self._teller = teller
        self._carry = carry or self._real
        self._start = start

    def run(self, trials: int, minutes: float, *, began: float | None = None) -> str:
        """Until so many trials are in the journal, or this has lasted so long (from `began` on, on the
        monotonic clock, by default from now on); why it ended. Whoever calls it holds the search's folder."""
        deadline = (time.monotonic() if began is None else began) + 60 * minutes
        self._settle_left_over()
        while True:
            lines = self._tune.ended()
            left = deadline - time.monotonic()
            coming = _coming(self._spec, self._space, lines, trials, minutes, left)
            if isinstance(coming, str):
                return coming
            seconds = min(LONGEST_SECONDS, max(left, _LEAST_FOR_FIRST_SECONDS if not lines else 0))
            self._one(len(lines) + 1, coming, seconds, tried_of(lines, self._space))

    def _one(self, number: int, coming: Next, seconds: float, tried: list[Tried]) -> None:
        candidate = coming.candidate
        began = Line(
            event="began",
            number=number,
            choice=candidate.choice,
            change=candidate.change,
            at=time.time(),
            reason="again, for a surer time" if coming.again else "",
            predicted_step_seconds=candidate.brief.step_seconds,
            needed_bytes=candidate.brief.needed_bytes,
        )
        self._tune.append(began)
        self._teller.began(began)
        run = self._spec_of(began)
        # One that is tried again is to be measured, however far behind.
        best_seconds = None if coming.again else next((t.step_seconds for t in fastest_first(tried)), None)
        try:
            got = self._carry(run, seconds, best_seconds, self._teller.show(began))
        except BaseException:
            # Whatever ends the search inside a trial, it has told nothing.
            with undisturbed():
                self._tune.append(replace(began, event="interrupted", at=time.time()))
            raise
        self._close(began, got)

    def _close(self, began: Line, got: Measured) -> None:
        line = _ended(began, got, self._spec_of(began))
        self._tune.append(line)
        self._teller.ended(line)

    def _spec_of(self, line: Line) -> RunSpec:
        return trial_spec(changed(self._spec, line.change))

    def _real(self, run: RunSpec, seconds: float, best_seconds: float | None, show: Show) -> Measured:
        return run_trial(
            run, self._tune.trials_root, seconds, best_step_seconds=best_seconds, show=show, start=self._start
        )

    def _settle_left_over(self) -> None:
        """The run of a trial outlives a search that was killed: it would disturb the next, and may have an
        answer."""
        for run in list_runs(self._tune.trials_root):
            end_run(run)
        began = self._tune.open_trial()
        if began is None:
            return
        left = self._run_of(began)
        got = finished_trial(left) if left is not None else None
        if got is None:
            self._tune.append(replace(began, event="interrupted", at=time.time()))
        else:
            self._close(began, got)

    def _run_of(self, began: Line) -> RunDir | None:
        """The run that was started for a trial; None where none was."""
        options = self._spec_of(began).options
        for run in list_runs(self._tune.trials_root):
            created = run.created()
            if created is None or created < began.at - _CLOCK_SECONDS:
                continue
            if run.spec(0).options == options:
                return run
        return None


def _room(lines: Sequence[Line], trials: int, left_seconds: float) -> int:
    """How many more trials the budget has room for, if they take as long as those before."""
    by_count = trials - len(lines)
    walls = [line.wall_seconds for line in lines if line.wall_seconds]
    return min(by_count, int(left_seconds / statistics.median(walls))) if walls else by_count


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
        error_seconds=got.error_seconds,
        steps_measured=got.steps_measured,
        tokens_per_second=run.tokens_per_step / got.step_seconds if got.step_seconds else None,
        peak_bytes=got.peak_bytes,
        wall_seconds=round(got.wall_seconds, 2),
    )
