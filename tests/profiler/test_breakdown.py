"""Predicted against actual adds up to the byte, whatever was measured and whatever was not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.profiler.breakdown import Breakdown, breakdown, process_peaks
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.record.deviceevents import ProcessSample
from llmtop.profiler.record.events import (
    AnyEvent,
    BaselineMeasured,
    HardwareSampled,
    MemoryClassified,
    PhaseMemory,
    StepFinished,
)
from llmtop.profiler.record.feed import read_state
from tests.recorded import make_recorded_run
from tests.recorded_spec import GIB, MIB, Kind, recorded_prediction, recorded_spec

SPEC = recorded_spec()
PREDICTION = recorded_prediction(SPEC)


def actual_sum(found: Breakdown) -> int:
    return sum(row.actual_bytes or 0 for row in found.rows if row.in_peak)


def rows(found: Breakdown) -> dict[Component, tuple[int | None, int | None]]:
    return {row.component: (row.predicted_bytes, row.actual_bytes) for row in found.rows}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_recorded_run_adds_up_with_every_component(tmp_path: Path, kind: Kind) -> None:
    run = make_recorded_run(tmp_path, kind=kind)
    found = breakdown(read_state(run), run.spec(), run.prediction())
    assert found.actual_peak_bytes is not None
    assert actual_sum(found) == found.actual_peak_bytes
    assert found.unexplained_bytes == rows(found)[Component.UNEXPLAINED][1]
    assert found.unexplained_percent is not None and abs(found.unexplained_percent) < 15
    assert found.error_percent is not None and abs(found.error_percent) < 10
    assert [row.component for row in found.rows] == [c for c in Component if c in rows(found)]
    predicted = sum(row.predicted_bytes or 0 for row in found.rows if row.in_peak)
    assert predicted == found.predicted_peak_bytes
    assert (Component.RUNTIME in rows(found)) == (kind == "cpu")
    for row in found.rows:
        if row.component in (Component.PARAMETERS, Component.ACTIVATIONS, Component.OPTIMIZER_STATE):
            assert row.error_percent == pytest.approx(3.0, abs=0.01)


def test_outside_the_allocator_adds_up_to_the_device(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda")
    found = breakdown(read_state(run), run.spec(), run.prediction())
    outside = sum(row.actual_bytes or 0 for row in found.rows if not row.in_peak)
    assert found.actual_peak_bytes is not None
    assert found.actual_peak_bytes + outside == found.actual_device_bytes
    predicted = sum(row.predicted_bytes or 0 for row in found.rows if not row.in_peak)
    assert found.predicted_peak_bytes is not None
    assert found.predicted_peak_bytes + predicted == found.predicted_device_bytes


def test_nothing_measured_shows_the_prediction_and_no_numbers() -> None:
    found = breakdown(RunState(), SPEC, PREDICTION)
    assert found.predicted_peak_bytes == PREDICTION.peak_allocated_bytes
    assert (found.actual_peak_bytes, found.unexplained_bytes, found.unexplained_percent) == (None, None, None)
    assert found.error_percent is None
    assert {row.actual_bytes for row in found.rows} == {None}


def measured(
    *, peaks: dict[str, int], moments: dict[str, dict[str, int]], rss: int | None = None, src: str = "rank0"
) -> RunState:
    memory = {phase: PhaseMemory(peak_bytes=size) for phase, size in peaks.items()}
    return fold(
        RunState(),
        [
            BaselineMeasured(rss_bytes=rss, src=src),
            *(MemoryClassified(step=1, moment=m, components=parts, src=src) for m, parts in moments.items()),
            StepFinished(step=1, phase_memory=memory, src=src),
        ],
    )


def test_the_components_are_those_of_a_moment_at_the_border_of_the_peaks_phase() -> None:
    moments = {
        "end_of_forward": {"parameters": 10, "activations": 50, "logits": 5},
        "first_block_backward": {"parameters": 10, "gradients": 10},
        "optimizer_step": {"parameters": 10, "gradients": 10, "optimizer_state": 20},
    }
    for phase, moment in (
        ("forward", "end_of_forward"),
        ("backward", "end_of_forward"),
        ("optimizer", "optimizer_step"),
    ):
        found = breakdown(measured(peaks={phase: 100}, moments=moments), SPEC, PREDICTION)
        assert (found.actual_moment, found.peak_phase) == (moment, phase)
    # With the graph gone, activations are known to be none.
    assert rows(found)[Component.ACTIVATIONS][1] == 0
    only_backward = {"first_block_backward": moments["first_block_backward"]}
    found = breakdown(measured(peaks={"backward": 100}, moments=only_backward), SPEC, PREDICTION)
    assert rows(found)[Component.ACTIVATIONS][1] == 0


def test_of_moments_that_hold_the_same_the_predicted_one_is_shown() -> None:
    late = msgspec.structs.replace(PREDICTION, peak_moment=Moment.FIRST_BLOCK_BACKWARD)
    for first, second, shown in ((100, 99, "first_block_backward"), (100, 80, "end_of_forward")):
        moments = {"end_of_forward": {"parameters": first}, "first_block_backward": {"parameters": second}}
        found = breakdown(measured(peaks={"backward": 120}, moments=moments), SPEC, late)
        assert found.actual_moment == shown
    moments["first_block_backward"] = {"parameters": 100}
    found = breakdown(measured(peaks={"forward": 100}, moments=moments), SPEC, late)
    assert found.actual_moment == "end_of_forward"
    assert rows(found)[Component.ACTIVATIONS][1] is None


def test_what_came_and_went_inside_the_phase_is_workspace() -> None:
    moment = MemoryClassified(
        step=1, moment="end_of_forward", components={"parameters": 60}, total_bytes=75, src="rank0"
    )
    state = fold(measured(peaks={"backward": 100}, moments={}, rss=10), [moment])
    found = breakdown(state, SPEC, PREDICTION)
    assert rows(found)[Component.WORKSPACE][1] == 25
    assert (rows(found)[Component.RUNTIME][1], found.unexplained_bytes) == (10, 5)
    named = msgspec.structs.replace(moment, components={"parameters": 60, "workspace": 4})
    found = breakdown(fold(state, [named]), SPEC, PREDICTION)
    assert (rows(found)[Component.WORKSPACE][1], found.unexplained_bytes) == (4, 26)


def test_the_rank_with_the_largest_peak_is_shown() -> None:
    state = measured(peaks={"forward": 100}, moments={"end_of_forward": {"parameters": 1}})
    other = measured(peaks={"backward": 120}, moments={"end_of_forward": {"parameters": 7}}, src="rank1")
    both = msgspec.structs.replace(state, ranks={**state.ranks, **other.ranks})
    found = breakdown(both, SPEC, PREDICTION)
    assert (found.peak_rank, found.peak_phase, found.actual_peak_bytes) == (1, "backward", 120)
    assert rows(found)[Component.PARAMETERS][1] == 7


def test_more_components_than_peak_make_a_negative_remainder() -> None:
    state = measured(peaks={"forward": 100}, moments={"end_of_forward": {"parameters": 90}}, rss=40)
    found = breakdown(state, SPEC, PREDICTION)
    assert found.unexplained_bytes == -30
    # The kernel had taken pages: a share of such a peak would say nothing.
    assert found.reclaimed and found.unexplained_percent is None
    near = breakdown(measured(peaks={"forward": 100}, moments={}, rss=104), SPEC, PREDICTION)
    assert not near.reclaimed and near.unexplained_percent == -4
    cuda = recorded_spec("cuda")
    assert not breakdown(state, cuda, recorded_prediction(cuda)).reclaimed


def test_the_peak_of_a_process_is_the_largest_that_anybody_saw() -> None:
    processes = (ProcessSample(rank=0, rss_bytes=90), ProcessSample(rank=1, rss_bytes=50))
    sample = HardwareSampled(processes=processes)
    state = fold(measured(peaks={"forward": 100, "data": 80}, moments={}), [sample])
    assert process_peaks(state, SPEC) == {0: 100, 1: 50}
    # On a GPU the peaks of the phases are the allocator's.
    assert process_peaks(state, recorded_spec("cuda")) == {0: 90, 1: 50}


def test_words_of_a_later_version_stay_unexplained() -> None:
    state = measured(peaks={"forward": 100}, moments={"end_of_forward": {"parameters": 60, "caches": 30}})
    assert breakdown(state, SPEC, PREDICTION).unexplained_bytes == 40


def test_a_prediction_without_its_peak_moment_still_compares_the_peaks() -> None:
    bare = msgspec.structs.replace(PREDICTION, moments=())
    found = breakdown(measured(peaks={"forward": GIB}, moments={}), SPEC, bare)
    assert [row.component for row in found.rows] == [Component.UNEXPLAINED]
    assert found.unexplained_bytes == found.actual_peak_bytes == GIB
    assert found.error_percent is not None


bytes_of = st.integers(min_value=0, max_value=10 * MIB)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["data", "forward", "backward", "optimizer"]), bytes_of),
    st.dictionaries(
        st.sampled_from([str(moment) for moment in Moment]),
        st.dictionaries(st.sampled_from([str(component) for component in Component]), bytes_of),
    ),
    st.one_of(st.none(), bytes_of),
    st.sampled_from(["cpu", "cuda"]),
)
def test_rows_add_up_to_the_peak_for_any_measurement(
    peaks: dict[str, int], moments: dict[str, dict[str, int]], rss: int | None, kind: Kind
) -> None:
    spec = recorded_spec(kind)
    found = breakdown(measured(peaks=peaks, moments=moments, rss=rss), spec, recorded_prediction(spec))
    if not peaks:
        assert found.actual_peak_bytes is None
    else:
        assert found.actual_peak_bytes == max(peaks.values())
        assert actual_sum(found) == found.actual_peak_bytes


def test_freed_memory_that_a_process_keeps_is_outside_of_what_was_in_use() -> None:
    """The first steps are exact; later the heap keeps 30, of which 20 lie above the peak."""
    kept = {"parameters": 60, "activations": 20, "fragmentation": 30}
    late: list[AnyEvent] = [
        MemoryClassified(step=9, moment="end_of_forward", components=kept, total_bytes=115, src="rank0"),
        StepFinished(step=9, phase_memory={"backward": PhaseMemory(peak_bytes=120)}, src="rank0"),
    ]
    first = StepFinished(
        step=1, phase_memory={"backward": PhaseMemory(peak_bytes=100)}, in_use_only=True, src="rank0"
    )
    profiled = StepFinished(
        step=3,
        phase_memory={"backward": PhaseMemory(peak_bytes=118)},
        in_use_only=True,
        profiled=True,
        src="rank0",
    )
    state = fold(RunState(), [BaselineMeasured(rss_bytes=4, src="rank0"), first, profiled, *late])
    found = breakdown(state, SPEC, PREDICTION)
    assert found.actual_peak_bytes == actual_sum(found) == 100
    outside = {row.component: row.actual_bytes for row in found.rows if not row.in_peak}
    assert outside == {Component.FRAGMENTATION: 20}
    assert (rows(found)[Component.WORKSPACE][1], found.unexplained_bytes) == (15, 1)
    assert process_peaks(state, SPEC) == {0: 120}


def test_without_exact_steps_what_the_heap_keeps_is_part_of_the_peak() -> None:
    kept = {"parameters": 60, "fragmentation": 30}
    found = breakdown(measured(peaks={"forward": 100}, moments={"end_of_forward": kept}), SPEC, PREDICTION)
    assert actual_sum(found) == found.actual_peak_bytes == 100
    assert rows(found)[Component.FRAGMENTATION][1] == 30
