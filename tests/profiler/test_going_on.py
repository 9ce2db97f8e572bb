"""The fold of a run that was gone on with after its end: what of its old processes counts then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.profiler.fold.ending import not_saved_words, unsaved_words
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.series import steady_steps
from llmtop.profiler.fold.spans import measured_spans
from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.checkpointevents import CheckpointLoaded, CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.deviceevents import DeviceSample, ProcessSample
from llmtop.profiler.record.events import (
    AnyEvent,
    HardwareSampled,
    RunEnded,
    StepFinished,
)
from llmtop.profiler.record.failureevents import HostMemoryRunsOut
from tests.recorded import started
from tests.recorded_spec import recorded_spec


def test_of_a_run_that_goes_on_the_steps_count_that_it_has_made_since() -> None:
    ended = RunEnded(t=20.0, state="stopped", reason="asked")
    state = fold(RunState(), [started(0.0), made(8, 8.0), made(9, 9.0), ended, started(30.0)])
    assert (state.steps_finished, state.present_step) == (9, None), "nobody knows yet where it goes on"
    state = fold(state, [made(10, 10.0)])
    assert state.steps_finished == 10, "a late line of the process before"
    # Also where its end is read before its step.
    state = fold(state, [replace(ended, t=40.0), made(5, 35.0)])
    assert (state.steps_finished, state.present_step, state.steps_made) == (5, 5, 4)
    assert fold(state, [made(6, 36.0)]).steps_finished == 6


def test_a_late_line_of_the_process_before_undoes_nothing_of_the_new_one() -> None:
    before: list[AnyEvent] = [started(0.0), made(8, 8.0), made(9, 9.0), stopped(20.0)]
    state = fold(RunState(), [*before, started(30.0, 4), made(10, 10.0)])
    assert state.status == "starting" and state.present_step == 4 and not state.ranks[0].steps_seen
    new = fold(state, [made(5, 31.0)])
    late = fold(new, [made(11, 11.0), loaded(3, 2.0)])
    assert late.status == "running" and not late.made_no_step
    assert (late.steps_finished, late.present_step) == (5, 5)
    assert late.steps_made == 5 and late.recent_steps == new.recent_steps and late.series == new.series
    assert late.ranks == new.ranks
    assert fold(late, [made(6, 32.0)]).present_step == 6


def made(number: int, t: float) -> StepFinished:
    return StepFinished(t=t, src="rank0", step=number, loss=2.0, step_seconds=1.0)


def loaded(step: int, t: float) -> CheckpointLoaded:
    return CheckpointLoaded(
        t=t, src="rank0", step=step, path="p", bytes_read=1, seconds=1.0, zero=0, world_size=1
    )


def saved(step: int, t: float, *, passing: bool = False) -> CheckpointSaved:
    return CheckpointSaved(t=t, src="rank0", step=step, path="p", size_bytes=1, seconds=1.0, passing=passing)


def stopped(t: float) -> RunEnded:
    return RunEnded(t=t, state="stopped", reason="asked")


def refused(step: int, t: float) -> CheckpointRefused:
    return CheckpointRefused(t=t, src="rank0", step=step, why="disk full")


def first_part() -> list[AnyEvent]:
    """Its checkpoint of step 12 is moved away then."""
    return [started(0.0), made(8, 8.0), saved(8, 8.5), refused(9, 9.5), made(12, 12.0), saved(12, 12.5)]


@pytest.mark.parametrize("told_by", ["its supervisor", "its rank", "its supervisor, read first"])
def test_what_is_lost_counts_from_the_checkpoint_that_it_went_on_from(told_by: str) -> None:
    spec = recorded_spec("cpu")
    went_on: list[AnyEvent] = [started(30.0, 8)]
    if told_by == "its rank":
        went_on = [started(30.0), loaded(8, 31.0)]
    if told_by == "its supervisor, read first":
        state = fold(RunState(), [*first_part()[:-1], stopped(20.0), *went_on, first_part()[-1]])
    else:
        state = fold(RunState(), [*first_part(), stopped(20.0), *went_on])
    assert [one.step for one in state.checkpoints] == [8] and state.last_saved == state.checkpoints[-1]
    if told_by != "its supervisor, read first":
        assert state.unsaved is None, "another had been saved after the refused one"
        at_17 = fold(state, [made(9, 39.0), made(17, 47.0), stopped(50.0)])
        words = "the newest checkpoint is of step 8, and the 9 steps since are lost"
        assert not_saved_words(at_17, spec) == words
    at_9 = fold(state, [made(9, 39.0), refused(9, 39.5), stopped(50.0)])
    words = "the newest is of step 8, and the 1 step since is lost: disk full"
    assert unsaved_words(at_9) == f"the checkpoint of step 9 could not be saved, {words}"
    new = fold(state, [made(9, 39.0), saved(9, 39.5), made(10, 40.0), saved(10, 40.5), stopped(50.0)])
    assert [one.step for one in new.checkpoints] == [8, 9, 10] and not not_saved_words(new, spec)


@pytest.mark.parametrize("end", ["stopped", "lost"])
@pytest.mark.parametrize("late", ["before it goes on", "after it goes on", "after its end"])
def test_a_run_that_ends_before_its_next_step_stands_where_it_went_on(end: str, late: str) -> None:
    last, last_end = made(12, 12.0), [stopped(35.0)] if end == "stopped" else []
    events: list[AnyEvent] = [started(0.0), made(7, 7.0), made(8, 8.0), saved(8, 8.5)]
    went_on: list[AnyEvent] = [stopped(20.0), started(30.0, 8)]
    told = {
        "before it goes on": [*events, last, *went_on, *last_end],
        "after it goes on": [*events, *went_on, last, *last_end],
        "after its end": [*events, *went_on, *last_end, last],
    }
    state = fold(RunState(), told[late])
    if end == "lost":
        state = replace(state, status="lost")  # as its reader tells
    assert (state.steps_finished, state.present_step, state.present_loss) == (8, 8, None)
    assert not not_saved_words(state, recorded_spec("cpu")), "what was made after it was lost before"


def test_steps_are_not_said_to_be_lost_where_nobody_told_what_it_went_on_after() -> None:
    spec = recorded_spec("cpu")
    unknown = fold(RunState(), [*first_part(), stopped(20.0), started(30.0), made(6, 36.0), stopped(50.0)])
    words = "the newest checkpoint is of step 12, from before it went on: nothing since is saved"
    assert not_saved_words(unknown, spec) == words
    at_6 = fold(RunState(), [*first_part(), stopped(20.0), started(30.0), made(6, 36.0), refused(6, 37.0)])
    words = "the checkpoint of step 6 could not be saved, the newest is of step 12: disk full"
    assert unsaved_words(fold(at_6, [stopped(50.0)])) == words
    # Of the step that it went on after, the record has no checkpoint.
    at_6 = fold(RunState(), [*first_part(), stopped(20.0), started(30.0, 4), made(6, 36.0), stopped(50.0)])
    words = "nothing was saved since it went on after step 4; the 2 steps since are lost"
    assert not at_6.checkpoints and not_saved_words(at_6, spec) == words


def test_while_it_is_beginning_a_run_has_no_loss() -> None:
    state = fold(RunState(), [started(0.0), made(9, 9.0), stopped(20.0), started(30.0, 4)])
    assert (state.last_loss, state.present_loss) == (2.0, None)
    assert fold(state, [made(5, 31.0)]).present_loss == 2.0


def test_nothing_of_the_processes_before_is_true_of_a_run_that_goes_on() -> None:
    sample = HardwareSampled(
        t=5.0,
        src="supervisor",
        devices=(DeviceSample(index=0, memory_used_bytes=9, is_lost=True),),
        processes=(ProcessSample(rank=0, rss_bytes=9, pss_bytes=6, compiler_rss_bytes=2),),
    )
    full = HostMemoryRunsOut(
        t=6.0,
        src="supervisor",
        seconds=60.0,
        used_bytes=1,
        limit_bytes=2,
        limit="machine",
        bytes_per_second=1.0,
    )
    ended = RunEnded(t=20.0, state="failed", reason="killed")
    before = fold(RunState(), [started(0.0), sample, full, ended])
    assert before.hardware == sample and before.lost_devices == {0} and before.memory_runs_out == full
    assert (before.peak_device_bytes, before.peak_rss_bytes, before.peak_pss_bytes) == (
        {0: 9},
        {0: 7},
        {0: 6},
    )
    state = fold(before, [started(30.0, goes_on_after=72)])
    assert (state.hardware, state.lost_devices, state.memory_runs_out) == (None, frozenset(), None)
    assert (state.peak_device_bytes, state.peak_rss_bytes, state.peak_pss_bytes) == ({}, {}, {})
    assert (before.peak_compiler_bytes, state.peak_compiler_bytes) == ({0: 2}, {})
    assert state.hardware_history == (sample,), "what was before is history"
    assert state.present_step == 72


REFUSED = ChangeRefused(t=72.0, src="supervisor", asked=("foo=1",), reason="unknown key")
LEFT = RestageFailed(t=70.5, src="supervisor", setting=1, back_to=0, reason="it ended", world_size=1)


def asked(setting: int, t: float, *, restage: bool = False) -> ChangeAsked:
    return ChangeAsked(t=t, src="supervisor", setting=setting, restage=restage)


def changed(setting: int, t: float, step: int) -> list[AnyEvent]:
    return [asked(setting, t - 0.1), ChangeApplied(t=t, src="rank0", setting=setting, step=step)]


def gone_on_from_40(*before: AnyEvent) -> RunState:
    """With setting 1 of step 50 on in force; steps 41 to 43 were made since."""
    to_50: list[AnyEvent] = [
        *(made(n, float(n)) for n in range(1, 50)),
        *changed(1, 49.2, 50),
        made(50, 50.0),
    ]
    again: list[AnyEvent] = [started(70.0, 40), loaded(40, 71.0), *(made(n, 31.0 + n) for n in (41, 42, 43))]
    return fold(RunState(), [started(0.0), *to_50, *before, stopped(60.0), *again])


def test_a_change_that_never_held_takes_no_step_from_the_speed() -> None:
    state = gone_on_from_40()
    at_once = fold(state, [REFUSED])
    refused_later = fold(state, [asked(2, 72.0), replace(REFUSED, setting=2, t=73.0)])
    given_up = fold(state, [asked(2, 72.0), replace(LEFT, setting=2, back_to=1, t=73.0)])
    for found in (state, at_once, refused_later, given_up):
        assert found.speed_series.steps == (41, 42, 43)


def test_a_change_of_before_that_is_settled_later_takes_no_step_from_the_speed() -> None:
    under_way: list[AnyEvent] = [
        asked(2, 50.5, restage=True),
        RestageBegan(t=51.0, src="supervisor", setting=2, from_setting=1, last_step=50, world_size=1),
    ]
    made_it = fold(gone_on_from_40(*under_way), [Restaged(t=74.1, src="supervisor", setting=2, step=51)])
    taken_back = fold(gone_on_from_40(*under_way), [replace(LEFT, setting=2, back_to=1, t=74.1)])
    hot = fold(gone_on_from_40(*changed(2, 50.5, 51)), [replace(LEFT, setting=2, back_to=1, t=74.1)])
    for state in (made_it, taken_back, hot):
        assert state.speed_series.steps == (41, 42, 43)


def test_a_change_since_it_went_on_leaves_the_speed_to_the_steps_on_it() -> None:
    state = fold(gone_on_from_40(), changed(2, 74.5, 44))
    assert state.speed_series.steps == ()
    state = fold(state, [made(44, 75.0), made(45, 76.0), replace(REFUSED, t=77.0)])
    assert state.speed_series.steps == (44, 45)


def test_steps_that_are_made_anew_are_of_the_setting_in_force() -> None:
    state = gone_on_from_40()
    spans = measured_spans(state)
    assert [(span.setting, span.first_step, span.last_step) for span in spans] == [(0, 1, 40), (1, 41, 43)]
    assert state.setting_series.steps == (50, 41, 42, 43), "what was made on it before is of it too"
    ended = fold(state, [stopped(80.0)])
    assert ended.speed_series.steps == (50, 41, 42, 43)
    assert len(steady_steps(ended.speed_series, WARMUP_STEPS)) == 1, "each launch has its first steps"
    back_again = fold(ended, [started(90.0, 42), made(43, 91.0)])
    assert [span.first_step for span in back_again.changes.spans] == [1, 41]
    before_all = fold(ended, [started(90.0, 0), made(1, 91.0)])
    assert [(span.setting, span.first_step) for span in before_all.changes.spans] == [(1, 1)]
    there_and_back = gone_on_from_40(*changed(0, 50.2, 51), *changed(1, 50.4, 52))
    assert [(span.setting, span.first_step) for span in there_and_back.changes.spans] == [(0, 1), (1, 41)]


def test_the_rank_tells_where_a_run_goes_on_whose_supervisor_does_not() -> None:
    """Over hosts: nobody sees all of what there is."""
    to_12 = [started(0.0), *(made(n, float(n)) for n in range(1, 10)), *changed(1, 9.2, 10)]
    to_12 += [*(made(n, float(n)) for n in (10, 11, 12)), stopped(20.0), started(30.0)]
    unknown = fold(RunState(), to_12)
    assert (unknown.steps_finished, unknown.present_step) == (12, None)
    told = fold(unknown, [loaded(8, 31.0)])
    assert (told.steps_finished, told.present_step, told.step_of(told.ranks[0])) == (8, 8, 8)
    assert [(span.setting, span.first_step) for span in told.changes.spans] == [(0, 1), (1, 9)]
    assert fold(told, [made(9, 40.0), made(10, 41.0)]).speed_series.steps == (9, 10)
    assert fold(told, [stopped(50.0)]).steps_finished == 8


def test_a_change_that_is_told_after_its_steps_has_them() -> None:
    """As a supervisor tells of one that the ranks have made by themselves."""
    steps = [made(n, float(n)) for n in range(1, 61)]
    state = fold(RunState(), [started(0.0), *steps, *changed(1, 61.0, 58), stopped(62.0)])
    assert state.setting_series.steps == (58, 59, 60)


def test_a_clock_that_was_set_back_takes_no_step_from_a_setting() -> None:
    events = [started(0.0), made(1, 201.0), *changed(1, 202.5, 2), *(made(n, 100.0 + n) for n in (2, 3, 4))]
    assert fold(RunState(), events).setting_series.steps == (2, 3, 4)


class _Played:
    """A run as its events tell it, beside a plain count of which setting each step was made on."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = [started(0.0)]
        self.t, self.step, self.setting, self.newest = 0.0, 0, 0, 0
        self.points: list[tuple[int, int]] = []
        """Setting and step."""
        self.standing: dict[int, int] = {}
        """Step to the setting that it was last made on."""

    def now(self) -> float:
        self.t += 1.0
        return self.t

    def make(self) -> None:
        self.step += 1
        self.events.append(made(self.step, self.now()))
        self.points.append((self.setting, self.step))
        self.standing[self.step] = self.setting

    def change(self) -> None:
        self.setting = self.newest = self.newest + 1
        self.events += changed(self.setting, self.now(), self.step + 1)

    def relaunch(self, *, fails: bool) -> None:
        before, self.newest = self.setting, self.newest + 1
        self.events.append(asked(self.newest, self.now(), restage=True))
        began = RestageBegan(
            t=self.now(),
            src="supervisor",
            setting=self.newest,
            from_setting=before,
            last_step=self.step,
            world_size=1,
        )
        self.events.append(began)
        if fails:
            left = replace(LEFT, setting=self.newest, back_to=before, t=self.now())
            self.events.append(left)
        else:
            self.setting = self.newest

    def go_on(self, share: float, *, told: bool) -> None:
        self.events.append(stopped(self.now()))
        self.step = int(share * self.step)
        self.events += [started(self.now(), self.step if told else None), loaded(self.step, self.now())]
        self.standing = {step: setting for step, setting in self.standing.items() if step <= self.step}


_DEEDS: dict[str, Callable[[_Played], None]] = {
    "change": _Played.change,
    "relaunch": lambda run: run.relaunch(fails=False),
    "failing relaunch": lambda run: run.relaunch(fails=True),
    "go on from its first steps": lambda run: run.go_on(0.3, told=True),
    "go on, told by its rank": lambda run: run.go_on(0.7, told=False),
    "go on from its last step": lambda run: run.go_on(1.0, told=True),
}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(sorted(_DEEDS))), max_size=10), st.integers(0, 3)
)
def test_each_step_is_of_the_setting_that_it_was_made_on(plays: list[tuple[int, str]], last: int) -> None:
    run = _Played()
    for steps, deed in plays:
        for _ in range(steps):
            run.make()
        _DEEDS[deed](run)
    for _ in range(last):
        run.make()
    state = fold(RunState(), run.events)
    assert state.changes.setting == run.setting
    assert state.setting_series.steps == tuple(n for setting, n in run.points if setting == run.setting)
    assert state.present_step == run.step
    spans = measured_spans(state)
    told = {n: span.setting for span in spans for n in range(span.first_step, (span.last_step or 0) + 1)}
    assert told == run.standing
