"""The fold: the same events give the same state however they are cut, and late lines undo nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.profiler.fold import series
from llmtop.profiler.fold.folding import _HANDLERS, fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, ProcessSample
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.events import (
    AnyEvent,
    Compiling,
    ControlAnswered,
    HangSuspected,
    HardwareSampled,
    MemoryClassified,
    NvmeMeasured,
    OpBuilt,
    OutsideMeasured,
    PeakClassified,
    PhaseMemory,
    RankExited,
    RankFailed,
    RankFinished,
    RankStarted,
    RunEnded,
    RunStarted,
    StageBegan,
    StageFinished,
    StepFinished,
    WeightsLoaded,
    WeightsRead,
)
from llmtop.profiler.record.feed import RunStream
from tests.recorded import make_recorded_run

small = st.integers(min_value=0, max_value=5)
maybe = st.one_of(st.none(), small)
times = st.floats(min_value=0, max_value=100)
sources = st.sampled_from(["rank0", "rank1", "supervisor", "rankx"])


def stamped(kind: Any, **fields: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, t=times, src=sources, **fields)


any_event = st.one_of(
    stamped(
        RunStarted,
        run_id=st.just("id"),
        name=st.just("n"),
        pid=small,
        host=st.just("h"),
        world_size=small,
        llmtop_version=st.just("1"),
    ),
    stamped(RankStarted, rank=small, pid=small),
    stamped(RankExited, rank=small, pid=small, exit_code=maybe),
    stamped(RunEnded, state=st.sampled_from(["completed", "failed"]), reason=st.just("")),
    stamped(
        ControlAnswered,
        request_id=st.just("r"),
        action=st.sampled_from(["stop", "set"]),
        answer=st.sampled_from(["accepted", "done", "refused"]),
    ),
    stamped(HangSuspected, last_step=small, quiet_seconds=times, threshold_seconds=times),
    stamped(Compiling, what=st.sampled_from(["a", "b"])),
    stamped(StageBegan, stage=st.sampled_from(["import", "engine"])),
    stamped(StageFinished, stage=st.sampled_from(["import", "engine"]), seconds=times),
    stamped(OpBuilt, name=st.just("cpu_adam"), seconds=times, compiled=st.booleans()),
    stamped(WeightsRead, read_bytes=small, total_bytes=small),
    stamped(WeightsLoaded, way=st.sampled_from(["streamed", "transformers"]), read_bytes=maybe),
    stamped(NvmeMeasured, path=st.just("/drive"), free_bytes=maybe),
    stamped(MemoryClassified, step=small, moment=st.sampled_from(["a", "b"]), components=st.just({})),
    stamped(
        PeakClassified,
        step=small,
        phase=st.sampled_from(["forward", "backward"]),
        moment=st.just("loss_backward"),
        components=st.just({"parameters": 1}),
        total_bytes=small,
    ),
    stamped(OutsideMeasured, moment=st.sampled_from(["context", "engine"]), device_used_bytes=maybe),
    stamped(RankFinished, reason=st.just("completed"), last_step=small, peak_rss_bytes=maybe),
    stamped(RankFailed, error_type=st.just("E"), message=st.just("")),
    stamped(
        StepFinished,
        step=small,
        loss=st.one_of(st.none(), times),
        loss_scale=maybe,
        skipped=st.booleans(),
        tokens=small,
        step_seconds=times,
        phase_seconds=st.dictionaries(st.sampled_from(["data", "forward"]), st.one_of(st.none(), times)),
        phase_memory=st.dictionaries(
            st.sampled_from(["forward", "backward"]),
            st.builds(PhaseMemory, allocated_bytes=maybe, peak_bytes=maybe, reserved_bytes=maybe),
        ),
    ),
    stamped(
        HardwareSampled,
        devices=st.lists(
            st.builds(
                DeviceSample,
                index=small,
                memory_used_bytes=maybe,
                throttle_reasons=st.one_of(st.none(), st.just(("power",))),
            ),
            max_size=2,
        ).map(tuple),
        host=st.builds(HostSample, memory_total_bytes=maybe, memory_available_bytes=maybe),
        processes=st.lists(
            st.builds(ProcessSample, rank=small, rss_bytes=maybe, pss_bytes=maybe), max_size=2
        ).map(tuple),
    ),
)


@settings(deadline=None)
@given(st.lists(any_event, max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_the_state_does_not_depend_on_the_cuts(events: list[AnyEvent], first: int, second: int) -> None:
    whole = fold(RunState(), events)
    low, high = sorted((first, second))
    cut = fold(fold(fold(RunState(), events[:low]), events[low:high]), events[high:])
    assert cut == whole
    state = RunState()
    for event in events:
        state = fold(state, [event])
    assert state == whole


@settings(deadline=None)
@given(st.lists(any_event, max_size=20), st.lists(any_event, max_size=20))
def test_folding_changes_no_earlier_state(before: list[AnyEvent], after: list[AnyEvent]) -> None:
    state = fold(RunState(), before)
    copy = msgspec.json.encode(state)
    fold(state, after)
    assert msgspec.json.encode(state) == copy


def step(number: int, *, t: float = 0.0, src: str = "rank0", **fields: Any) -> StepFinished:
    return StepFinished(step=number, t=t or float(number), src=src, **{"loss": 1.0 / number, **fields})


def test_no_events_give_the_same_object() -> None:
    state = fold(RunState(), [step(1)])
    assert fold(state, []) is state


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(0, 200), max_size=4))
def test_a_series_keeps_first_and_last_and_even_spacing(count: int, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "SERIES_POINTS", 10)
        events: list[AnyEvent] = [step(n) for n in range(1, count + 1)]
        state, position = RunState(), 0
        for cut in [*sorted(cuts), count]:
            state = fold(state, events[position:cut])
            position = max(position, cut)
        kept = state.series
        assert state == fold(RunState(), events)
    assert kept.steps[0] == 1 and kept.steps[-1] == count
    assert len(kept.steps) <= 10 + 1
    assert kept.count == count
    assert all((n - 1) % kept.stride == 0 for n in kept.steps[:-1])
    assert list(kept.steps[:-1]) == list(range(1, count, kept.stride))
    assert {len(column) for column in (kept.times, kept.losses, kept.step_seconds)} == {len(kept.steps)}


def test_a_long_series_is_thinned_to_about_two_thousand_points() -> None:
    state = fold(RunState(), [step(n) for n in range(1, 100_001)])
    assert 1000 <= len(state.series.steps) <= 2001
    assert (state.series.steps[0], state.series.steps[-1]) == (1, 100_000)
    assert state.steps_finished == 100_000


def test_hardware_history_keeps_the_newest() -> None:
    samples: list[AnyEvent] = [HardwareSampled(t=float(n), src="hardware") for n in range(1000)]
    state = fold(RunState(), samples)
    assert state.hardware_history == tuple(samples[-300:])
    assert state.hardware is samples[-1]
    assert state.hardware_samples == 1000


def test_status_goes_from_starting_to_the_end() -> None:
    stop = ControlAnswered(request_id="r", action="stop", answer="accepted", t=3.0)
    state = fold(RunState(), [RankStarted(rank=0, pid=5)])
    assert state.status == "starting"
    state = fold(state, [step(1)])
    assert state.status == "running"
    refused = fold(state, [msgspec.structs.replace(stop, answer="refused")])
    assert refused.status == "running"
    state = fold(state, [stop, step(2)])
    assert state.status == "stopping"
    state = fold(state, [RunEnded(state="stopped", reason="asked")])
    assert state.status == "stopped"
    # Lines that were read late do not bring the run back to life.
    assert fold(state, [step(3), stop, RankExited(rank=0, pid=5, exit_code=0)]).status == "stopped"


def test_losses_steps_and_skips_come_from_rank_zero() -> None:
    state = fold(
        RunState(),
        [
            step(1, src="rank1", loss=9.0),
            step(1, loss=None, skipped=True, loss_scale=65536.0),
            step(2, loss=4.0, loss_scale=32768.0),
            step(3, loss=3.0),
            step(4, src="rank1", skipped=True),
        ],
    )
    assert (state.first_loss, state.last_loss) == (4.0, 3.0)
    assert (state.nonfinite_losses, state.first_nonfinite_step) == (1, 1)
    assert (state.skipped_steps, state.steps_finished) == (1, 3)
    assert state.first_loss_scale == 65536.0
    assert fold(state, [step(5, loss=None)]).last_loss is None


def test_peaks_are_the_largest_readings_and_unknown_ones_do_not_count() -> None:
    state = fold(
        RunState(),
        [
            step(1, phase_memory={"forward": PhaseMemory(allocated_bytes=5, peak_bytes=9)}),
            step(2, phase_memory={"forward": PhaseMemory(allocated_bytes=7, peak_bytes=8)}),
            step(3, phase_memory={"forward": PhaseMemory()}),
            HardwareSampled(
                devices=(DeviceSample(index=0, memory_used_bytes=50), DeviceSample(index=1)),
                host=HostSample(memory_total_bytes=100, memory_available_bytes=30, cgroup_used_bytes=4),
                processes=(ProcessSample(rank=1, rss_bytes=8, pss_bytes=6),),
            ),
            HardwareSampled(
                devices=(DeviceSample(index=0, memory_used_bytes=40),),
                host=HostSample(memory_total_bytes=100),
                processes=(ProcessSample(rank=1, rss_bytes=9),),
            ),
            # An op is built: what its compilers take is no peak of the rank.
            HardwareSampled(
                processes=(
                    ProcessSample(
                        rank=1, rss_bytes=50, pss_bytes=40, compiler_rss_bytes=45, compiler_pss_bytes=38
                    ),
                ),
            ),
            RankFinished(reason="completed", last_step=3, peak_rss_bytes=12, src="rank1"),
        ],
    )
    assert state.ranks[0].peaks == {"forward": PhaseMemory(allocated_bytes=7, peak_bytes=9)}
    assert state.peak_device_bytes == {0: 50}
    assert (state.peak_rss_bytes, state.peak_pss_bytes) == ({1: 12}, {1: 6})
    assert state.peak_compiler_bytes == {1: 45}
    assert (state.peak_host_bytes, state.peak_cgroup_bytes, state.peak_swap_bytes) == (70, 4, None)


def test_phase_times_leave_out_warm_up() -> None:
    seconds: dict[str, float | None] = {"forward": 2.0, "data": None}
    state = fold(
        RunState(),
        [step(1, phase_seconds={"forward": 50.0}), *(step(n, phase_seconds=seconds) for n in (2, 3, 4))],
    )
    totals = state.ranks[0].phase_totals
    assert (totals["forward"].seconds, totals["forward"].steps) == (4.0, 2)
    assert "data" not in totals
    later = fold(state, [step(5, phase_seconds={})])
    assert later.ranks[0].phase_totals == totals and later.ranks[0].step_total.steps == 3
    assert later.ranks[0].phase_seconds == seconds, "of the newest step that tells them"


def test_stages_show_what_goes_on_and_how_long_it_took() -> None:
    state = fold(
        RunState(),
        [
            StageBegan(stage="import", t=1.0, src="rank0"),
            StageFinished(stage="import", seconds=4.0, t=5.0, src="rank0"),
            StageFinished(stage="data", seconds=1.0, t=6.0, src="rank0"),
            StageBegan(stage="engine", t=7.0, src="rank0"),
        ],
    )
    stages = [(s.stage, s.began, s.seconds) for s in state.ranks[0].stages]
    assert stages == [("import", 1.0, 4.0), ("data", 5.0, 1.0), ("engine", 7.0, None)]


def test_a_relaunched_rank_starts_afresh_and_the_series_goes_on() -> None:
    first = fold(RunState(), [RankStarted(rank=0, pid=1), step(1), RankExited(rank=0, pid=1, exit_code=0)])
    again = fold(first, [RankStarted(rank=0, pid=2), step(2)])
    assert again.ranks[0].exited is None
    assert again.ranks[0].steps_seen == 1
    assert again.series.steps == (1, 2)
    # The start of the same process, read after its first lines, forgets nothing.
    late = fold(RunState(), [step(1), RankStarted(rank=0, pid=1)])
    assert late.ranks[0].last_step is not None and late.ranks[0].pid == 1


def test_a_hang_and_a_compilation_pass_when_steps_come_again() -> None:
    hang = HangSuspected(last_step=3, quiet_seconds=400.0, threshold_seconds=300.0, t=10.0)
    state = fold(RunState(), [Compiling(what="cpu_adam", t=9.0), hang])
    assert (state.hang_seconds, state.compiling) == (400.0, "cpu_adam")
    earlier = fold(state, [step(3, t=8.0)])
    assert (earlier.hang_seconds, earlier.compiling) == (400.0, "cpu_adam")
    later = fold(state, [step(4, t=11.0)])
    assert (later.hang_seconds, later.compiling, later.compiled) == (None, None, ("cpu_adam",))
    other_rank = fold(state, [StageFinished(stage="import", seconds=1.0, t=11.0, src="rank1")])
    assert other_rank.compiling == "cpu_adam"
    built = fold(state, [StageFinished(stage="engine", seconds=1.0, t=11.0, src="rank1")])
    assert built.compiling is None


def test_throttled_samples_are_counted_by_device_and_reason() -> None:
    hot = HardwareSampled(devices=(DeviceSample(index=2, throttle_reasons=("thermal", "power")),))
    cool = HardwareSampled(devices=(DeviceSample(index=2, throttle_reasons=()),))
    state = fold(RunState(), [hot, cool, hot])
    assert state.throttled_samples == {2: {"thermal": 2, "power": 2}}


def test_every_kind_of_event_is_folded() -> None:
    assert set(_HANDLERS) == set(get_args(AnyEvent))


@pytest.mark.parametrize(("src", "rank"), [("rank0", 0), ("rank12", 12), ("hardware", None), ("rank", None)])
def test_rank_of_a_source(src: str, rank: int | None) -> None:
    assert rank_of(src) == rank


@pytest.mark.parametrize("end", ["completed", "failed", "out_of_memory"])
def test_a_recorded_run_folds_to_its_story(tmp_path: Path, end: Any) -> None:
    run = make_recorded_run(tmp_path, end=end, checkpoint_every=20)
    events = list(RunStream(run).poll())
    state = fold(RunState(), events)
    assert state.status == end
    assert state.run_id == run.run_id
    assert state.steps_finished == 60 and len(state.ranks) == 2
    assert state.first_loss is not None and state.last_loss is not None
    assert state.last_loss < 0.7 * state.first_loss
    assert [c.step for c in state.checkpoints] == [20, 40, 60]
    assert state.now == max(event.t for event in events)
    assert all(rank.exited is not None for rank in state.ranks.values())


def test_the_steps_of_a_host_are_those_of_its_first_rank() -> None:
    """Rank 0 alone tells the loss: elsewhere a step without one is no step whose loss is not a number."""
    steps = [
        StepFinished(t=2.0, src="rank9", step=1, step_seconds=9.0),
        StepFinished(t=2.0, src="rank8", step=1, step_seconds=1.0, tokens=10),
        StepFinished(t=3.0, src="rank8", step=2, step_seconds=2.0, tokens=10),
    ]
    elsewhere = RankStarted(t=1.0, src="supervisor", rank=3, pid=1)
    state = fold(RunState(world_size=16, first_rank=8, host_ranks=8), [elsewhere, *steps])
    assert set(state.ranks) == {8, 9}
    assert state.steps_finished == 2
    assert state.series.step_seconds == (1.0, 2.0)
    assert state.nonfinite_losses == 0
    assert state.first is not None and state.first.rank == 8
    assert list(state.ranks_here) == list(range(8, 16))
