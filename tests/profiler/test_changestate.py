"""Changes in the fold: what is in force, what was measured on it, whatever the order of the logs."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import HISTORY_SAMPLES, RunState
from llmtop.profiler.fold.series import MiddleHalf, mean_rate, steady_steps, within_noise
from llmtop.profiler.fold.spans import measured_spans
from llmtop.profiler.memory.result import Component
from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    KeyChange,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, ProcessSample
from llmtop.profiler.record.events import (
    AnyEvent,
    HardwareSampled,
    MemoryClassified,
    PhaseMemory,
    RankExited,
    RankFinished,
    RankStarted,
    RunEnded,
    RunStarted,
    StepFinished,
)
from llmtop.profiler.report.changes import changes_of
from tests.recorded_spec import recorded_prediction, recorded_spec

ASKED = ChangeAsked(t=3.5, setting=1, changes=(KeyChange(key="micro_batch", old=4, new=2),), src="supervisor")


def started(world_size: int = 2) -> list[AnyEvent]:
    run = RunStarted(
        run_id="r", name="n", pid=1, host="h", world_size=world_size, llmtop_version="1", src="supervisor"
    )
    return [run, *(RankStarted(rank=r, pid=10 + r, src="supervisor") for r in range(world_size))]


def step(number: int, rank: int = 0, peak: int = 100, seconds: float = 1.0) -> StepFinished:
    memory = {"forward": PhaseMemory(peak_bytes=peak)}
    return StepFinished(
        t=float(number), src=f"rank{rank}", step=number, loss=1.0, step_seconds=seconds, phase_memory=memory
    )


def applied(setting: int, first: int, rank: int = 0, problem: str = "") -> ChangeApplied:
    return ChangeApplied(t=first - 0.5, src=f"rank{rank}", setting=setting, step=first, problem=problem)


def test_a_change_between_two_steps_begins_a_span_with_peaks_of_its_own() -> None:
    events: list[AnyEvent] = [
        *started(),
        *(step(n, rank, peak=900 + rank) for n in (1, 2, 3) for rank in (0, 1)),
        ASKED,
        applied(1, 4, rank=1),
        applied(1, 4, rank=0),
        *(step(n, rank, peak=500 + rank, seconds=2.0) for n in (4, 5, 6, 7) for rank in (0, 1)),
    ]
    state = fold(RunState(), events)
    assert state.changes.setting == 1 and state.changes.records[0].status == "applied"
    first, second = measured_spans(state)
    assert (first.first_step, first.last_step, first.peak_bytes) == (1, 3, 901)
    assert (second.first_step, second.last_step, second.peak_bytes) == (4, 7, 501)
    assert (first.step_seconds, second.step_seconds) == (1.0, 2.0)
    piecewise = RunState()
    for event in events:
        piecewise = fold(piecewise, [event])
    assert piecewise == state


def machine(t: float, used_percent: float = 60.0, processes: int = 1) -> HardwareSampled:
    """One rank takes half of the only processor."""
    return HardwareSampled(
        t=t,
        src="hardware",
        devices=(DeviceSample(index=0, process_count=processes),),
        host=HostSample(cpu_percent=used_percent, cpu_count=1),
        processes=(ProcessSample(rank=0, cpu_percent=50.0),),
    )


def around_a_change(before: HardwareSampled, after: HardwareSampled) -> list[AnyEvent]:
    """Steps 1 to 6 on one setting and 7 to 12 on the next, with a sample of each kind within each."""
    replaced = msgspec.structs.replace
    return [
        *started(1),
        *(event for n in range(1, 7) for event in (replaced(before, t=n - 0.6), step(n))),
        ASKED,
        applied(1, 7),
        *(event for n in range(7, 13) for event in (replaced(after, t=n - 0.6), step(n, seconds=2.0))),
    ]


QUIET, CROWDED, BUSY = machine(0.0), machine(0.0, processes=2), machine(0.0, used_percent=95.0)
MIND = "mind, the step times tell of more than the change: "
SHARED = f"{MIND}other processes were on a device of the run"
LOAD = "other programs used {} and {} of the processors before and after it"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (QUIET, QUIET, None),
        (QUIET, CROWDED, f"{SHARED} after it"),
        (CROWDED, QUIET, f"{SHARED} before it"),
        (CROWDED, CROWDED, f"{SHARED} before and after it"),
        (QUIET, BUSY, f"{MIND}{LOAD.format('10%', '45%')}"),
        (BUSY, CROWDED, f"{SHARED} after it, and {LOAD.format('45%', '10%')}"),
        (BUSY, BUSY, None),
    ],
)
def test_what_others_did_is_not_laid_to_the_change(
    before: HardwareSampled, after: HardwareSampled, told: str | None
) -> None:
    state = fold(RunState(), around_a_change(before, after))
    (change,) = changes_of(state)
    assert "step time 1.00 s -> 2.00 s" in change.details
    assert [words for words in change.details if words.startswith("mind")] == ([told] if told else [])
    # Others that come when the last of those steps is over, or went before the first, are no matter.
    apart = [machine(0.2, 95.0, 2), *around_a_change(QUIET, QUIET), machine(12.5, 95.0, 2)]
    assert not any("mind" in words for words in changes_of(fold(RunState(), apart))[0].details)


def test_what_others_did_is_known_of_a_setting_that_was_left_long_ago() -> None:
    """When the samples are no longer kept, by the trail of the whole run, but for a bucket at its border."""
    seconds = 3 * HISTORY_SAMPLES
    events: list[AnyEvent] = [*started(1)]
    for t in range(1, 2 * seconds):
        sample = CROWDED if 100 < t < seconds else QUIET
        events += [ASKED, applied(1, seconds)] if t == seconds else []
        events += [msgspec.structs.replace(sample, t=t - 0.6), step(t)]
    state = fold(RunState(), events)
    assert state.hardware_history[0].t > seconds
    first, second = measured_spans(state)
    assert (first.device_is_shared, second.device_is_shared) == (True, False)
    assert first.others_percent == second.others_percent == pytest.approx(10.0)


def test_what_a_setting_uses_is_not_told_while_the_process_keeps_what_another_freed() -> None:
    """On the CPU: the steps that show what is in use come first, and a process gives nothing back later."""
    exact = [msgspec.structs.replace(step(n, peak=500), in_use_only=True) for n in (1, 2, 3)]
    kept: list[AnyEvent] = [*started(1), *exact, step(4, peak=600), ASKED, applied(1, 5), step(5, peak=600)]
    state = fold(RunState(), kept)
    assert [span.peak_bytes for span in measured_spans(state)] == [500, None]
    spec = recorded_spec("cpu", ranks=1)
    prediction = recorded_prediction(spec)
    assert breakdown(state, spec, prediction).actual_peak_bytes is None
    before = fold(RunState(), kept[:-3])
    assert breakdown(before, spec, prediction).actual_peak_bytes == 500


def test_after_a_change_the_peak_is_what_was_in_use_at_classified_moments() -> None:
    """As the process keeps what the setting before had freed; until the first step is over it is told why."""
    exact = [msgspec.structs.replace(step(n, peak=500), in_use_only=True) for n in (1, 2, 3)]
    moments = [
        MemoryClassified(
            t=5.2,
            src="rank0",
            step=5,
            moment=moment,
            components={"activations": part, "fragmentation": kept},
            total_bytes=590,
        )
        for moment, part, kept in (("end_of_forward", 30, 180), ("between_steps", 0, 260))
    ]
    events: list[AnyEvent] = [*started(1), *exact, step(4, peak=600), ASKED, applied(1, 5)]
    spec = recorded_spec("cpu", ranks=1)
    prediction = recorded_prediction(spec)
    changed = fold(RunState(), events)
    found = breakdown(changed, spec, prediction)
    assert found.actual_peak_bytes is None
    assert found.not_yet == (
        "changed from step 5 on, which is measured when it is over; before it 500 B were in use at most"
    )
    measured = fold(changed, [*moments, step(5, peak=600)])
    found = breakdown(measured, spec, prediction)
    assert (found.actual_peak_bytes, found.peak_phase) == (410, "forward")
    assert found.actual_moment == "end_of_forward"
    assert found.peak_is_seen and not found.not_yet
    actual = {row.component: row.actual_bytes for row in found.rows if row.in_peak}
    assert sum(size or 0 for size in actual.values()) == 410 and actual[Component.ACTIVATIONS] == 30
    assert Component.FRAGMENTATION not in {
        row.component for row in found.rows if row.actual_bytes is not None
    }
    assert [span.peak_bytes for span in measured_spans(measured)] == [500, 410]


def test_times_are_of_the_steps_on_the_setting_in_force() -> None:
    before: list[AnyEvent] = [*started(1), *(step(n) for n in (1, 2, 3)), ASKED, applied(1, 4)]
    changed = fold(RunState(), before)
    assert changed.setting_series.steps == (), "those of another setting do not tell how fast this one is"
    slow = fold(changed, [step(4, seconds=50.0)])
    assert (slow.setting_series.steps, slow.setting_series.step_seconds) == ((4,), (50.0,))
    slow = fold(slow, [step(n, seconds=51.0) for n in (5, 6, 7)])
    assert [seconds for seconds, _ in steady_steps(slow.setting_series, WARMUP_STEPS)] == [51.0, 51.0]
    assert slow.series.steps == tuple(range(1, 8))


def test_how_fast_it_is_the_steps_of_its_present_processes_alone_tell() -> None:
    def shown(state: RunState) -> tuple[int, ...]:
        return state.speed_series.steps

    running = fold(RunState(), [*started(1), *(step(n) for n in (1, 2, 3))])
    assert shown(running) == (1, 2, 3)
    change = msgspec.structs.replace(ASKED, restage=True)
    restage = RestageBegan(t=4.0, setting=1, from_setting=0, last_step=3, world_size=1, src="supervisor")
    left = RankExited(rank=0, pid=10, exit_code=0, t=4.0, src="supervisor")
    new = RankStarted(rank=0, pid=20, setting=1, t=5.0, src="supervisor")
    restaged = fold(running, [change, left, restage])
    assert restaged.status == "starting" and shown(restaged) == shown(fold(restaged, [new])) == ()
    later = [msgspec.structs.replace(step(n), t=t) for n, t in ((4, 6.0), (5, 7.0))]
    assert shown(fold(restaged, [new, *later])) == (4, 5)
    # It fails, and other processes go on with the setting that the first ones had.
    failed = RestageFailed(t=8.0, setting=1, back_to=0, reason="oom", world_size=1, src="supervisor")
    back: list[AnyEvent] = [
        msgspec.structs.replace(left, pid=20, exit_code=1, t=7.0),
        failed,
        msgspec.structs.replace(new, pid=30, setting=0, t=9.0),
    ]
    gone_back = fold(restaged, [new, *back])
    assert shown(gone_back) == () and gone_back.setting_series.steps == (1, 2, 3)
    made = fold(gone_back, [msgspec.structs.replace(step(4), t=10.0)])
    assert shown(made) == (4,)
    # It ends, and is gone on with from before its change.
    ended = fold(restaged, [new, *later, RunEnded(t=11.0, state="stopped", reason="asked", src="supervisor")])
    assert ended.speed_series == ended.setting_series and shown(ended) == (4, 5)
    run, rank = started(1)
    again = [msgspec.structs.replace(run, t=20.0), msgspec.structs.replace(rank, pid=40, setting=1, t=21.0)]
    resumed = fold(ended, again)
    assert shown(resumed) == ()
    assert shown(fold(resumed, [msgspec.structs.replace(step(2), t=22.0)])) == (2,)


@pytest.mark.parametrize("ended", [True, False])
def test_what_lies_between_an_end_and_going_on_is_no_part_of_the_time_in_all(ended: bool) -> None:
    """A lost run has written no end: its last step stands for it."""
    run, *ranks = started(1)
    end = [RunEnded(t=3.0, state="stopped", reason="asked", src="supervisor")] if ended else []
    first = [msgspec.structs.replace(run, t=0.5), *ranks, *(step(n) for n in (1, 2, 3)), *end]
    again = [msgspec.structs.replace(run, t=243.0), step(244)]
    state = fold(RunState(), [*first, *again])
    assert (state.started, state.paused_seconds) == (0.5, 240.0)
    assert state.seconds_until(state.now) == 3.5
    assert fold(RunState(), first).seconds_until(3.0) == 2.5


def test_a_script_s_step_of_unknown_tokens_has_no_rate() -> None:
    steps = [step(n) for n in (1, 2, 3, 4)]
    state = fold(RunState(), [*started(1), *steps])
    assert state.series.tokens_per_second == (None,) * 4
    assert mean_rate(steady_steps(state.series, WARMUP_STEPS)) is None
    counted = msgspec.structs.replace(steps[3], step=5, tokens=8, step_seconds=2.0)
    assert mean_rate(steady_steps(fold(state, [counted]).series, WARMUP_STEPS)) == 4.0


@pytest.mark.parametrize(
    ("first", "second", "noise"),
    [
        (
            MiddleHalf(low_seconds=1.0, high_seconds=3.32),
            MiddleHalf(low_seconds=0.09, high_seconds=0.41),
            False,
        ),
        (
            MiddleHalf(low_seconds=1.0, high_seconds=3.32),
            MiddleHalf(low_seconds=0.09, high_seconds=1.2),
            True,
        ),
        (MiddleHalf(low_seconds=1.0, high_seconds=1.2), MiddleHalf(low_seconds=1.0, high_seconds=1.1), False),
        (MiddleHalf(low_seconds=1.0, high_seconds=3.32), None, True),
    ],
)
def test_middle_halves_that_do_not_overlap_are_no_noise(
    first: MiddleHalf, second: MiddleHalf | None, noise: bool
) -> None:
    assert within_noise(-1.4, first, second) is noise


def test_what_the_processes_before_a_relaunch_held_is_not_the_new_setting_s() -> None:
    held = RankFinished(t=2, src="rank0", last_step=1, reason="stopped", peak_rss_bytes=628)
    events = relaunch()
    before = fold(RunState(), [*events[:-2], held])
    assert before.peak_rss_bytes == {0: 628}
    assert fold(before, events[-2:]).peak_rss_bytes == {}


def test_a_change_that_the_ranks_refuse_changes_nothing() -> None:
    refused = ChangeRefused(t=5, src="supervisor", setting=1, reason="too short")
    problem = [applied(1, 4, rank, problem="too short") for rank in (0, 1)]
    state = fold(RunState(), [*started(), step(3), ASKED, *problem, refused])
    assert [record.status for record in state.changes.records] == ["refused"]
    assert state.changes.setting == 0 and state.ranks[0].peaks
    alone = ChangeRefused(t=6, src="supervisor", asked=("zero=9",), reason="no")
    assert len(fold(state, [alone]).changes.records) == 2


def relaunch() -> list[AnyEvent]:
    """Two ranks, a step, and a relaunch with one."""
    return [
        *started(),
        step(1),
        step(1, rank=1),
        ChangeAsked(t=1.5, setting=1, restage=True, src="supervisor"),
        *(RankExited(t=2, rank=r, pid=10 + r, exit_code=0, src="supervisor") for r in (0, 1)),
        RestageBegan(t=3, setting=1, from_setting=0, last_step=1, world_size=1, src="supervisor"),
        RankStarted(t=3, rank=0, pid=20, setting=1, src="supervisor"),
    ]


def test_a_relaunch_is_a_start_that_keeps_what_was_measured() -> None:
    state = fold(RunState(), relaunch())
    assert (state.status, state.world_size, list(state.ranks)) == ("starting", 1, [0])
    assert state.changes.under_way is not None
    restaged = Restaged(t=9, setting=1, step=2, down_seconds=8.0, src="supervisor")
    state = fold(state, [step(1, rank=1), step(2, peak=50), restaged])
    assert list(state.ranks) == [0], "a late line of a rank that is gone brings nothing back"
    assert state.status == "running" and state.changes.records[0].down_seconds == 8.0
    assert [(span.setting, span.peak_bytes) for span in measured_spans(state)] == [(0, 100), (1, 50)]


def test_a_failed_relaunch_is_back_on_the_old_setting() -> None:
    failed = RestageFailed(t=5, setting=1, back_to=0, reason="no", world_size=2, src="supervisor")
    state = fold(RunState(), [*relaunch(), failed])
    assert state.changes.records[0].status == "failed" and state.changes.records[0].reason == "no"
    assert (state.changes.setting, state.world_size) == (0, 2)
    assert [span.setting for span in state.changes.spans] == [0]


def test_an_ended_run_keeps_its_end() -> None:
    end = RunEnded(t=4, state="failed", reason="x", src="supervisor")
    failed = RestageFailed(t=5, setting=1, back_to=0, reason="no", world_size=2, src="supervisor")
    assert fold(RunState(), [*relaunch(), end, failed]).status == "failed"


def test_every_setting_has_its_steps_once() -> None:
    spans = fold(RunState(), [*relaunch(), step(2)]).changes.spans
    assert all(a.first_step < b.first_step for a, b in pairwise(spans))
