"""Samples of the links laid over one step."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llmtop.profiler.fold.stepprofile import step_profile
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.events import HardwareSampled, StepFinished

COLUMNS = 10


def steps(count: int, *, accum: int = 1) -> list[StepFinished]:
    """Of a second each: 0.4 s forward, 0.5 s backward, 0.1 s optimizer."""
    phases = {"data": 0.0, "forward": 0.4, "backward": 0.5, "optimizer": 0.1}
    return [
        StepFinished(
            step=n, src="rank0", t=float(n), step_seconds=1.0, grad_accum=accum, phase_seconds=dict(phases)
        )
        for n in range(1, count + 1)
    ]


def samples(every: float, count: int) -> list[HardwareSampled]:
    """Two devices that send 1 in forward, 3 in backward and nothing else."""
    found = []
    for number in range(count):
        t = number * every
        within = (t - every / 2) % 1.0
        rate = 1.0 if within < 0.4 else 3.0 if within < 0.9 else 0.0
        devices = tuple(DeviceSample(index=index, nvlink_tx_bytes_per_second=rate) for index in range(2))
        found.append(HardwareSampled(devices=devices, t=t))
    return found


def test_rates_stand_under_the_phases_that_carried_them() -> None:
    found = step_profile(samples(0.05, 150), steps(7), COLUMNS)
    assert found is not None and found.steps == 7 and found.samples == 140
    sent = [rate for rate in found.rates["nvlink_tx_bytes_per_second"] if rate is not None]
    assert sent == pytest.approx([*[2.0] * 4, *[6.0] * 5, 0.0])
    assert found.rates["pcie_rx_bytes_per_second"] == (None,) * COLUMNS
    assert [round(stretch.ended, 3) for stretch in found.stretches if stretch.ended > stretch.began] == [
        *(0.4, 0.9, 1.0)
    ]


def test_the_phases_are_of_the_newest_step_that_tells_them() -> None:
    made = [step if step.step % 5 == 0 else replace(step, phase_seconds={}) for step in steps(7)]
    found = step_profile(samples(0.05, 150), made, COLUMNS)
    assert found is not None and found.steps == 7, "rates are of all steps"
    ended = [round(stretch.ended, 3) for stretch in found.stretches if stretch.ended > stretch.began]
    assert ended == [0.4, 0.9, 1.0]


def test_each_micro_batch_has_its_own_stretches() -> None:
    found = step_profile(samples(0.05, 150), steps(7, accum=2), COLUMNS)
    assert found is not None
    told = [stretch.phase for stretch in found.stretches if stretch.ended > stretch.began]
    assert told == ["forward", "backward", "forward", "backward", "optimizer"]


def test_samples_that_are_long_beside_a_step_tell_nothing() -> None:
    assert step_profile(samples(0.5, 150), steps(60), COLUMNS) is None
    assert step_profile(samples(0.05, 8), steps(7), COLUMNS) is None
    assert step_profile([], [], COLUMNS) is None


def test_a_step_that_took_much_longer_is_left_out() -> None:
    slow = StepFinished(step=8, src="rank0", t=17.0, step_seconds=10.0, phase_seconds={"forward": 10.0})
    found = step_profile(samples(0.05, 340), [*steps(7), slow], COLUMNS)
    assert found is not None and found.steps == 7 and found.step_seconds == 1.0
