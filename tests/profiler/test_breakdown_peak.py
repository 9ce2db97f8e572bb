"""The breakdown of a traced peak on CUDA, and of what lies outside the allocator."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.profiler.breakdown import Breakdown, breakdown
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.allocator import outside_parts
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.events import (
    UNREAD_STEPS,
    AnyEvent,
    BaselineMeasured,
    HardwareSampled,
    MemoryClassified,
    OutsideMeasured,
    OutsideMoment,
    PeakClassified,
    PhaseMemory,
    RankExited,
    RankStarted,
    StepFinished,
)
from tests.recorded_spec import GIB, MIB, recorded_prediction, recorded_spec

SPEC = recorded_spec("cuda", ranks=1)
PREDICTION = recorded_prediction(SPEC)
PEAK = 40 * GIB
PARTS = {"parameters": 16 * GIB, "activations": 20 * GIB, "logits": 3 * GIB, "workspace": GIB - 5 * MIB}


def traced(step: int = 2, *, total: int = PEAK, unnamed: int = 5 * MIB, **parts: int) -> PeakClassified:
    return PeakClassified(
        step=step,
        phase="backward",
        moment="loss_backward",
        components=parts or PARTS,
        total_bytes=total,
        unnamed_bytes=unnamed,
        largest_unnamed=(3 * MIB, 2 * MIB),
        src="rank0",
    )


def step_of(peak: int, *, reserved: int | None = None) -> StepFinished:
    memory = {
        "forward": PhaseMemory(peak_bytes=peak // 2, reserved_bytes=reserved),
        "backward": PhaseMemory(peak_bytes=peak, reserved_bytes=reserved),
    }
    return StepFinished(step=2, phase_memory=memory, src="rank0")


def between(peak: int) -> StepFinished:
    """A step that was read, and what those before it reached that were not."""
    memory = {UNREAD_STEPS: PhaseMemory(peak_bytes=peak), "backward": PhaseMemory(peak_bytes=PEAK)}
    return StepFinished(step=20, phase_memory=memory, memory_every=10, src="rank0")


def found(*events: AnyEvent) -> Breakdown:
    return breakdown(fold(RunState(), events), SPEC, PREDICTION)


def actual(result: Breakdown) -> dict[Component, int | None]:
    return {row.component: row.actual_bytes for row in result.rows}


def test_a_traced_peak_is_shown_to_the_byte_and_what_nobody_knew_as_unexplained() -> None:
    result = found(traced(), step_of(PEAK))
    assert result.exact
    assert (result.actual_moment, result.peak_phase) == (Moment.LOSS_BACKWARD, "backward")
    assert {str(name): actual(result)[name] for name in Component if str(name) in PARTS} == PARTS
    assert result.unexplained_bytes == 5 * MIB
    assert result.largest_unnamed == (3 * MIB, 2 * MIB)
    assert sum(row.actual_bytes or 0 for row in result.rows if row.in_peak) == PEAK
    # The trace names all that there is: what it does not list was not there.
    assert actual(result)[Component.OPTIMIZER_STATE] == 0


def test_the_trace_is_preferred_to_a_classified_border() -> None:
    border = MemoryClassified(
        step=2, moment="end_of_forward", components={"parameters": 1}, total_bytes=9, src="rank0"
    )
    result = found(border, traced(), step_of(PEAK))
    assert actual(result)[Component.PARAMETERS] == 16 * GIB
    assert not found(border, step_of(PEAK)).exact


def test_a_peak_of_another_phase_is_not_explained_by_it() -> None:
    memory = {"optimizer": PhaseMemory(peak_bytes=2 * PEAK)}
    optimizer = StepFinished(step=3, phase_memory=memory, src="rank0")
    result = found(traced(), step_of(PEAK), optimizer)
    assert (result.exact, result.peak_phase) == (False, "optimizer")


def test_what_a_later_step_reached_beyond_the_trace_is_unexplained() -> None:
    result = found(traced(), step_of(PEAK + GIB))
    assert result.unexplained_bytes == GIB + 5 * MIB
    assert sum(row.actual_bytes or 0 for row in result.rows if row.in_peak) == PEAK + GIB


def test_of_several_traces_the_one_of_the_largest_peak_is_kept() -> None:
    small = traced(1, total=PEAK // 2, parameters=7)
    for events in ((small, traced()), (traced(), small)):
        assert found(*events, step_of(PEAK)).unexplained_bytes == 5 * MIB
    newer = traced(100, parameters=8 * GIB)
    assert actual(found(traced(), newer, step_of(PEAK)))[Component.PARAMETERS] == 8 * GIB


def test_a_new_process_in_a_ranks_place_forgets_the_traces_of_the_old_one() -> None:
    first: list[AnyEvent] = [RankStarted(rank=0, pid=1), traced(), outside("context", used=GIB)]
    state = fold(RunState(), first)
    assert state.ranks[0].peaks_classified and state.ranks[0].outside
    state = fold(state, [RankExited(rank=0, pid=1, exit_code=1), RankStarted(rank=0, pid=2)])
    assert not state.ranks[0].peaks_classified and not state.ranks[0].outside


def test_words_of_a_later_version_are_unexplained() -> None:
    result = found(traced(unnamed=0, parameters=PEAK - GIB, caches=GIB), step_of(PEAK))
    assert result.unexplained_bytes == GIB


words = st.sampled_from([str(component) for component in Component])


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(words, st.integers(0, GIB)), st.integers(0, 4 * GIB), st.integers(0, GIB))
def test_rows_add_up_for_any_trace(parts: dict[str, int], peak: int, unnamed: int) -> None:
    event = PeakClassified(
        step=1,
        phase="backward",
        moment="loss_backward",
        components=parts,
        total_bytes=peak,
        unnamed_bytes=unnamed,
        src="rank0",
    )
    result = found(event, step_of(peak))
    assert sum(row.actual_bytes or 0 for row in result.rows if row.in_peak) == result.actual_peak_bytes


def outside(
    moment: OutsideMoment, *, used: int | None, own: int | None = None, reserved: int = 0
) -> OutsideMeasured:
    return OutsideMeasured(
        moment=moment,
        device_used_bytes=used,
        process_used_bytes=own,
        reserved_bytes=reserved,
        src="rank0",
    )


def readings(*, by_process: bool) -> list[AnyEvent]:
    """640 MiB of others, a context of 500 MiB, NCCL of 300 MiB, kernels that come with the first step."""
    held: list[tuple[OutsideMoment, int, int]] = [
        ("untouched", 0, 0),
        ("context", 500, 0),
        ("process_group", 802, 2),
        ("engine", 850 + 9000, 9000),
        ("first_step", 1100 + 20000, 20000),
        ("second_step", 1200 + 21000, 21000),
    ]
    return [
        outside(
            moment,
            used=(640 + own) * MIB,
            own=own * MIB if by_process and own else None,
            reserved=reserved * MIB,
        )
        for moment, own, reserved in held
    ]


def sampled(used: int) -> HardwareSampled:
    return HardwareSampled(devices=(DeviceSample(index=0, memory_used_bytes=used),), src="hardware")


@pytest.mark.parametrize("by_process", [True, False])
def test_what_lies_outside_is_told_apart_by_differences(by_process: bool) -> None:
    device = (640 + 1200 + 21000) * MIB
    result = found(
        *readings(by_process=by_process), sampled(device), step_of(20000 * MIB, reserved=21000 * MIB)
    )
    assert {row.component: row.actual_bytes for row in result.rows if not row.in_peak} == {
        Component.FRAGMENTATION: 1000 * MIB,
        Component.CUDA_CONTEXT: 500 * MIB,
        Component.NCCL: 300 * MIB,
        Component.LOADED_KERNELS: 400 * MIB,
        Component.OTHER_PROCESSES: 640 * MIB,
    }
    assert result.actual_device_bytes == device


def test_each_part_outside_is_compared_with_its_own_prediction() -> None:
    result = found(*readings(by_process=True), step_of(20000 * MIB, reserved=21000 * MIB))
    rows = {row.component: row for row in result.rows if not row.in_peak}
    for component in (Component.CUDA_CONTEXT, Component.NCCL, Component.LOADED_KERNELS):
        predicted, measured = rows[component].predicted_bytes, rows[component].actual_bytes
        assert predicted is not None and measured is not None
        assert rows[component].error_percent == pytest.approx(100 * (predicted / measured - 1))


def test_others_that_come_between_two_readings_are_no_kernels() -> None:
    result = found(
        *readings(by_process=True), sampled(60_000 * MIB), step_of(20000 * MIB, reserved=21000 * MIB)
    )
    assert actual(result)[Component.LOADED_KERNELS] == 400 * MIB
    assert actual(result)[Component.OTHER_PROCESSES] == (60_000 - 21_000 - 1200) * MIB
    assert result.actual_device_bytes == 60_000 * MIB


def test_the_sampler_may_miss_the_largest_use() -> None:
    late = found(*readings(by_process=True), sampled(5000 * MIB), step_of(20000 * MIB, reserved=21000 * MIB))
    assert late.actual_device_bytes == (640 + 1200 + 21000) * MIB
    rows = {row.component: row.actual_bytes or 0 for row in late.rows if not row.in_peak}
    assert 20000 * MIB + sum(rows.values()) == late.actual_device_bytes


def test_others_that_come_later_are_seen_where_the_driver_tells_processes_apart() -> None:
    events = readings(by_process=True)
    last = events[-1]
    assert isinstance(last, OutsideMeasured) and last.device_used_bytes is not None
    crowded = msgspec.structs.replace(last, device_used_bytes=last.device_used_bytes + GIB)
    result = found(*events[:-1], crowded, step_of(20000 * MIB, reserved=21000 * MIB))
    assert actual(result)[Component.OTHER_PROCESSES] == 640 * MIB + GIB
    assert actual(result)[Component.LOADED_KERNELS] == 400 * MIB


def test_a_driver_that_tells_nothing_leaves_everything_unmeasured() -> None:
    silent = [outside(moment, used=None) for moment in ("untouched", "context", "process_group")]
    result = found(*silent, step_of(20000 * MIB, reserved=21000 * MIB))
    rows = {row.component: row.actual_bytes for row in result.rows if not row.in_peak}
    assert rows[Component.FRAGMENTATION] == 1000 * MIB
    assert rows[Component.CUDA_CONTEXT] is None
    assert rows[Component.NCCL] is None


def test_records_without_these_readings_show_the_context_as_one() -> None:
    baseline = BaselineMeasured(device_used_before_bytes=640 * MIB, src="rank0")
    device = (640 + 1200 + 21000) * MIB
    result = found(baseline, sampled(device), step_of(20000 * MIB, reserved=21000 * MIB))
    assert actual(result)[Component.CUDA_CONTEXT] == 1200 * MIB
    context = next(row for row in result.rows if row.component is Component.CUDA_CONTEXT)
    whole = outside_parts(SPEC)
    parts = (Component.CUDA_CONTEXT, Component.NCCL, Component.LOADED_KERNELS)
    assert context.predicted_bytes == sum(whole[part] for part in parts)
    assert Component.LOADED_KERNELS not in actual(result)


def test_steps_that_were_not_read_count_where_they_reached_clearly_more() -> None:
    alike = found(step_of(PEAK), traced(), between(PEAK + MIB))
    assert (alike.actual_peak_bytes, alike.peak_phase, alike.exact) == (PEAK, "backward", True)
    more = found(step_of(PEAK), traced(), between(PEAK + 2 * GIB))
    assert (more.actual_peak_bytes, more.peak_phase, more.exact) == (PEAK + 2 * GIB, UNREAD_STEPS, False)
