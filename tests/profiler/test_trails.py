"""What is kept of a whole run: memory over time, a rank's own pace, forecasts, links by phase."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.profiler.findings.host import growth
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.memorytrail import TRAIL_POINTS, MemoryTrail
from llmtop.profiler.fold.pace import PACE_BUCKETS
from llmtop.profiler.fold.phaselinks import phase_traffic, stretches
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.forecast import Forecast, forecast, slope_of
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, ProcessSample
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, StepFinished
from llmtop.profiler.record.stepevents import BETWEEN

MIB, GIB = 1 << 20, 1 << 30


def sample(t: float, used: int, **host: Any) -> HardwareSampled:
    return HardwareSampled(
        t=t,
        devices=(DeviceSample(index=0, memory_used_bytes=used),),
        host=HostSample(**host),
        processes=(ProcessSample(rank=0, rss_bytes=used // 2),),
    )


def step(number: int, rank: int = 0, **fields: Any) -> StepFinished:
    values = {"t": float(number), "step_seconds": 1.0, "loss": 2.0, **fields}
    return StepFinished(step=number, src=f"rank{rank}", **values)


def cut(events: list[AnyEvent], size: int) -> RunState:
    state = RunState()
    for at in range(0, len(events), size):
        state = fold(state, events[at : at + size])
    return state


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=1500), st.integers(1, 400))
def test_the_trail_keeps_every_peak_and_does_not_depend_on_the_cuts(readings: list[int], size: int) -> None:
    events: list[AnyEvent] = [sample(float(t), used) for t, used in enumerate(readings)]
    trail = cut(events, size).memory_trail
    assert trail == cut(events, len(events)).memory_trail
    assert len(trail.points) <= TRAIL_POINTS + 1
    assert max(used for used in trail.of_device(0) if used is not None) == max(readings)
    times = [point.t for point in trail.points]
    assert times == sorted(times) and times[-1] == len(readings) - 1
    assert trail.samples == len(readings)


def test_a_trail_of_what_was_not_read_is_empty() -> None:
    state = fold(RunState(), [HardwareSampled(t=1.0)])
    assert state.memory_trail.of_device(0) == (None,)
    assert MemoryTrail().of_process(0) == ()


@settings(max_examples=30, deadline=None)
@given(st.integers(WARMUP_STEPS + 1, 900), st.integers(1, 300))
def test_a_ranks_pace_is_the_mean_of_its_steps(steps: int, size: int) -> None:
    events: list[AnyEvent] = [step(n, phase_seconds={"forward": 0.1 * n}) for n in range(1, steps + 1)]
    pace = cut(events, size).ranks[0].alone
    assert pace == cut(events, steps).ranks[0].alone
    assert pace.steps == steps - WARMUP_STEPS and len(pace.sums) <= PACE_BUCKETS
    assert sum(pace.sums) == pytest.approx(sum(0.1 * n for n in range(WARMUP_STEPS + 1, steps + 1)))
    for bucket in range(pace.first_bucket, pace.end_bucket):
        inside = range(bucket * pace.stride, (bucket + 1) * pace.stride)
        own = [n for n in inside if WARMUP_STEPS < n <= steps]
        assert pace.mean(bucket, bucket + 1) == pytest.approx(0.1 * sum(own) / len(own))
        assert pace.began(bucket) == own[0]
    whole = pace.mean(pace.first_bucket, pace.end_bucket)
    assert whole == pytest.approx(sum(pace.sums) / pace.steps)
    coarse = pace.coarser(4 * pace.stride)
    assert coarse.steps == pace.steps
    assert coarse.mean(coarse.first_bucket, coarse.end_bucket) == pytest.approx(whole)


def test_buckets_of_a_pace_are_of_the_same_steps_however_many_are_told() -> None:
    every = [step(n, phase_seconds={"forward": 0.1 * n}) for n in range(1, 401)]
    some = [step(n, phase_seconds={"forward": 0.1 * n} if n % 40 == 0 else {}) for n in range(1, 401)]
    dense, sparse = (fold(RunState(), events).ranks[0].alone for events in (every, some))
    assert (dense.stride, sparse.stride) == (16, 16) and sparse.steps == 10
    assert sparse.first_step == 40 and sparse.began(sparse.first_bucket) == 40
    assert sparse.mean(2, 3) == pytest.approx(4.0) and dense.mean(2, 3) == pytest.approx(0.1 * 39.5)
    assert sparse.mean(3, 4) is None and sparse.count(3, 4) == 0 and sparse.mean(0, 1) is None


def growing(per_second: float, noise: float, seed: int = 1, count: int = 120) -> list[HardwareSampled]:
    rng = random.Random(seed)
    return [
        sample(
            1000.0 + t,
            GIB,
            memory_total_bytes=32 * GIB,
            memory_available_bytes=round(24 * GIB - per_second * t + rng.gauss(0, noise)),
        )
        for t in range(count)
    ]


def seen(history: list[HardwareSampled], since: float | None = 0.0) -> Forecast:
    found = forecast(history, since)
    assert found is not None
    return found


def test_growth_is_told_with_its_uncertainty() -> None:
    told = seen(growing(16 * MIB, 8 * MIB))
    left = (32 - 8) * GIB - 16 * MIB * 119
    assert told.limit == "machine" and told.seconds is not None
    assert told.seconds == pytest.approx(left / (16 * MIB), rel=0.05)
    assert told.earliest_seconds is not None and told.latest_seconds is not None
    assert told.earliest_seconds < told.seconds < told.latest_seconds


def test_noise_and_sawteeth_are_no_growth() -> None:
    assert seen(growing(0.0, 64 * MIB)).seconds is None
    teeth = [
        sample(
            1.0 + t, 0, memory_total_bytes=32 * GIB, memory_available_bytes=20 * GIB - (t % 20) * 100 * MIB
        )
        for t in range(100)
    ]
    assert seen(teeth).seconds is None


def used(levels: list[float], seed: int = 3) -> list[HardwareSampled]:
    """A sample a second of a host of 64 GiB, by GiB in use, with the jitter of a quiet one."""
    rng = random.Random(seed)
    return [
        sample(
            1000.0 + t,
            0,
            memory_total_bytes=64 * GIB,
            memory_available_bytes=round((64 - level) * GIB + rng.gauss(0, 4 * MIB)),
        )
        for t, level in enumerate(levels)
    ]


@pytest.mark.parametrize(
    "levels",
    [
        [7.6 + 1.5 * (1 - math.exp(-t / 15)) for t in range(180)],
        [7.6 + (0.9 if t > 25 else 0.0) for t in range(180)],
        [7.6 + min(t, 20) / 15 for t in range(180)],
    ],
    ids=["levels-off", "one-jump", "a-ramp-that-ends"],
)
def test_what_starts_up_on_a_quiet_host_is_no_leak_at_any_moment(levels: list[float]) -> None:
    history = used(levels)
    for end in range(10, len(history), 3):
        told = forecast(history[:end], 0.0)
        assert told is None or told.seconds is None, end


def test_a_leak_is_forecast_within_a_minute_and_from_then_on() -> None:
    history = used([20.0 + t / 60 for t in range(180)])
    for end in range(60, len(history), 10):
        told = seen(history[:end])
        assert told.seconds == pytest.approx((44 - end / 60) * 60, rel=0.1), end


@pytest.mark.parametrize(
    ("level", "a_minute", "is_told"), [(7.6, 1.5, False), (20.0, 1.5, True), (7.6, 8.0, True)]
)
def test_while_plenty_is_free_only_what_fills_soon_is_told(
    level: float, a_minute: float, is_told: bool
) -> None:
    events: list[AnyEvent] = [step(n + 1, t=900.0 + n, step_seconds=1.0) for n in range(100)]
    state = fold(
        RunState(status="running"), [*events, *used([level + a_minute * t / 60 for t in range(120)])]
    )
    told = growth(state)
    assert told is not None and (told.seconds is not None) is is_told
    assert told.slope.per_second == pytest.approx(a_minute * GIB / 60, rel=0.05)


def test_memory_that_shrinks_never_fills() -> None:
    assert seen(growing(-16 * MIB, MIB)).seconds is None


def test_start_up_is_no_growth_and_a_few_samples_tell_nothing() -> None:
    history = growing(16 * MIB, MIB)
    assert forecast(history, None) is None
    assert forecast(history, history[-10].t) is None
    assert forecast([], 0.0) is None


def test_the_limit_that_fills_first_is_the_one_told() -> None:
    history = [
        sample(
            float(t),
            0,
            memory_total_bytes=64 * GIB,
            memory_available_bytes=60 * GIB - t * 10 * MIB,
            cgroup_limit_bytes=8 * GIB,
            cgroup_used_bytes=2 * GIB + t * 10 * MIB,
        )
        for t in range(1, 90)
    ]
    assert seen(history).limit == "cgroup"


@given(st.floats(-1e6, 1e6), st.floats(-1e9, 1e9))
def test_a_line_has_its_own_slope(per_second: float, start: float) -> None:
    times = [float(t) for t in range(60)]
    found = slope_of(times, [start + per_second * t for t in times])
    assert found is not None
    assert found.per_second == pytest.approx(per_second, abs=1e-3 + 1e-6 * abs(start))


def linked(t: float, sent: float) -> HardwareSampled:
    return HardwareSampled(
        t=t, devices=tuple(DeviceSample(index=i, nvlink_tx_bytes_per_second=sent) for i in (0, 1))
    )


PHASES = {"data": 0.0, "forward": 2.0, "backward": 4.0, "optimizer": 1.0}


def test_gathers_are_seen_in_the_phase_that_makes_them() -> None:
    """ZeRO-3: much in forward and backward, little in the optimizer; sampled four times a second."""
    steps = [
        step(n, t=7.0 * n + 0.3, ended=7.0 * n, step_seconds=7.0, phase_seconds=PHASES) for n in range(1, 9)
    ]
    carried = {"forward": 100e9, "backward": 200e9, "optimizer": 1e9}

    def phase_at(t: float) -> str:
        inside = (t - 1e-6) % 7.0
        return "forward" if inside < 2 else "backward" if inside < 6 else "optimizer"

    history = [linked(t / 4, carried[phase_at(t / 4)]) for t in range(0, 4 * 56 + 1)]
    found = phase_traffic(history, steps)
    assert found.tells
    rates = {row.phase: row.rates[0] for row in found.rows}
    assert rates == {"data": None, **{phase: pytest.approx(2 * rate) for phase, rate in carried.items()}}
    assert all(row.rates[2] is None for row in found.rows)


def test_what_a_script_does_between_its_steps_is_in_no_other_phase() -> None:
    seconds = {"data": 1.0, BETWEEN: 4.0, "forward": 2.0, "backward": 2.0, "optimizer": 1.0}
    steps = [
        step(n, t=10.0 * n, ended=10.0 * n, step_seconds=10.0, phase_seconds=seconds) for n in range(1, 9)
    ]
    assert [(s.phase, s.began) for s in stretches(steps[0])][2] == ("forward", 5.0)
    history = [linked(t / 4, 1e9 if (t / 4 - 1e-6) % 10 < 5 else 100e9) for t in range(0, 4 * 80 + 1)]
    rates = {row.phase: row.rates[0] for row in phase_traffic(history, steps).rows}
    assert rates.keys() == seconds.keys()
    assert rates[BETWEEN] == pytest.approx(2e9) and rates["forward"] == pytest.approx(200e9)


def test_sampling_slower_than_the_phases_tells_nothing() -> None:
    steps = [step(n, step_seconds=1.0, phase_seconds={"forward": 0.3, "backward": 0.6}) for n in range(1, 60)]
    found = phase_traffic([linked(float(t) + 0.5, 1e9) for t in range(60)], steps)
    assert not found.tells
    assert found.sample_seconds == 1.0 and found.longest_seconds == pytest.approx(0.6)


@given(
    st.integers(1, 8),
    st.fixed_dictionaries({phase: st.floats(0, 5) for phase in PHASES}),
    st.floats(0, 1),
)
def test_the_phases_of_a_step_fill_it_and_follow_each_other(
    rounds: int, phases: dict[str, float], rest: float
) -> None:
    seconds = sum(phases.values()) + rest
    one = step(9, t=100.0, step_seconds=seconds, grad_accum=rounds, phase_seconds=phases)
    found = list(stretches(one))
    assert found[0].began == pytest.approx(100.0 - seconds)
    assert found[-1].ended <= 100.0 + 1e-6
    assert all(a.ended == pytest.approx(b.began) for a, b in zip(found, found[1:], strict=False))
    spent = {p: sum(s.ended - s.began for s in found if s.phase == p) for p in phases}
    assert spent == pytest.approx(phases, abs=1e-6)


def test_loss_scale_and_skipped_steps_are_columns() -> None:
    state = fold(RunState(), [step(1, loss_scale=8.0), step(2, loss_scale=4.0, skipped=True), step(3)])
    assert state.series.loss_scales == (8.0, 4.0, None)
    assert state.series.skipped == (False, True, False)
    assert [one.step for one in state.recent_steps] == [1, 2, 3]
