"""Memory is read as often as its cost allows, and what is reached between two readings is not lost."""

from __future__ import annotations

import pytest

from llmtop.profiler.probes.allocator import Peaks
from llmtop.profiler.probes.readings import ALWAYS_READ_STEPS, MemoryReadings, ReadingRate, counted_every
from llmtop.profiler.record.events import UNREAD_STEPS, Phase, PhaseMemory

PHASES: tuple[Phase, ...] = ("forward", "backward")


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Meter:
    """Counters that keep their peak until they are read, and take a while to read."""

    def __init__(self, time: Time, read_seconds: float) -> None:
        self.peak = 0
        self._time = time
        self._read_seconds = read_seconds

    def start_step(self) -> PhaseMemory:
        return self.stop_phase()

    def stop_phase(self) -> PhaseMemory:
        self._time.now += self._read_seconds
        peak, self.peak = self.peak, 0
        return PhaseMemory(allocated_bytes=1, peak_bytes=peak, reserved_bytes=2 * peak)

    def total_bytes(self) -> int | None:
        return None

    def peaks(self) -> Peaks:
        return Peaks()


class Training:
    """Steps of two phases, each of which reaches the step's own number of bytes."""

    def __init__(self, *, read_seconds: float, step_seconds: float = 0.1) -> None:
        self.time = Time()
        self.meter = Meter(self.time, read_seconds)
        self.readings = MemoryReadings(self.meter, self.time)
        self.seconds = step_seconds
        self.step = 0

    def run(self, steps: int, *, closely: bool = False) -> list[dict[str, int | None]]:
        return [self._one(closely) for _ in range(steps)]

    def _one(self, closely: bool) -> dict[str, int | None]:
        self.step += 1
        due = self.readings.is_due(self.step) or closely
        if due:
            self.readings.start_step()
        else:
            self.readings.pass_step()
        self.time.now += self.seconds
        for phase in PHASES:
            self.meter.peak = max(self.meter.peak, self.step)
            if due:
                self.readings.stop_phase(phase)
        if due:
            self.readings.finish_step(plain=True)
        return {phase: memory.peak_bytes for phase, memory in self.readings.phases.items()}


def read_steps(seen: list[dict[str, int | None]]) -> list[int]:
    return [number for number, phases in enumerate(seen, 1) if phases]


def test_what_costs_little_is_read_in_every_step() -> None:
    training = Training(read_seconds=4e-6)
    assert read_steps(training.run(30)) == list(range(1, 31))
    assert training.readings.rate.every == 1


@pytest.mark.parametrize(
    ("read_seconds", "step_seconds", "every"),
    [(15e-6, 0.1, 5), (50e-6, 0.1, 20), (15e-6, 0.004, 20), (1.0, 0.1, 100)],
    ids=["dear", "dearer", "in short steps", "never less than one in a hundred"],
)
def test_what_costs_more_is_read_as_seldom_as_it_must(
    read_seconds: float, step_seconds: float, every: int
) -> None:
    """A step has three readings here."""
    training = Training(read_seconds=read_seconds, step_seconds=step_seconds)
    seen = read_steps(training.run(300))
    always = list(range(1, ALWAYS_READ_STEPS + 1))
    assert seen == always + [step for step in range(ALWAYS_READ_STEPS + 1, 301) if step % every == 0]
    assert training.readings.rate.every == every


@pytest.mark.parametrize(
    ("cost_seconds", "step_seconds", "every"),
    [(0.0009, 0.02, 100), (0.004, 0.02, 500), (1.0, 0.02, 1000), (0.02, 0.5, 100), (0.03, 0.5, 200)],
    ids=["cheap", "dear", "never less than one in ten of them", "in long steps", "dear in long steps"],
)
def test_tensors_are_counted_less_often_where_that_takes_much(
    cost_seconds: float, step_seconds: float, every: int
) -> None:
    assert counted_every(100, cost_seconds, step_seconds) == every


def test_one_reading_that_was_held_up_changes_nothing() -> None:
    time = Time()
    rate = ReadingRate(time)
    time.now += 0.1
    assert rate.is_due(1)
    for seconds in (1e-6, 1e-6, 1.0):
        rate.took(seconds)
    assert rate.every == 1


def test_steps_of_which_nobody_asked_count_as_ones_of_their_mean_length() -> None:
    time = Time()
    rate = ReadingRate(time)
    for step in range(1, ALWAYS_READ_STEPS + 1):
        assert rate.is_due(step)
        time.now += 0.2
    rate.took(50e-6)
    assert (rate.every, rate.next_due(ALWAYS_READ_STEPS)) == (5, 10)
    for step in (10, 15, 20):
        time.now += 5 * 0.02 - (0.2 if step == 10 else 0.0)
        assert rate.is_due(step)
    assert rate.steps == 20
    assert rate.step_seconds == pytest.approx(0.02)


def test_peaks_of_steps_that_were_not_read_are_told_with_the_next_reading() -> None:
    seen = Training(read_seconds=15e-6).run(15)
    assert seen[4] == {"forward": 5, "backward": 5}
    assert seen[5:9] == [{}] * 4
    assert seen[9] == {UNREAD_STEPS: 9, "forward": 10, "backward": 10}
    assert seen[14] == {UNREAD_STEPS: 14, "forward": 15, "backward": 15}


def test_a_step_that_is_read_for_another_reason_is_not_among_the_unread() -> None:
    training = Training(read_seconds=15e-6)
    training.run(10)
    training.meter.peak = 999  # what the probes themselves took after the step
    assert training.run(1, closely=True) == [{"forward": 11, "backward": 11}]
    assert training.run(1) == [{}]
    assert training.run(1, closely=True) == [{UNREAD_STEPS: 12, "forward": 13, "backward": 13}]


def test_what_is_taken_between_two_steps_is_no_step_s() -> None:
    training = Training(read_seconds=15e-6)
    training.run(12)
    training.readings.settle()
    training.meter.peak = 999  # a checkpoint
    assert training.run(2) == [{UNREAD_STEPS: 12, "forward": 13, "backward": 13}, {}]


def test_another_setting_is_not_told_what_the_one_before_reached() -> None:
    training = Training(read_seconds=15e-6)
    training.run(12)
    training.readings.change()
    assert training.run(1) == [{"forward": 13, "backward": 13}]


def test_the_highest_peak_of_a_phase_is_none_of_start_up() -> None:
    training = Training(read_seconds=4e-6)
    training.meter.peak = 999
    training.run(3)
    assert training.readings.highest_phase_peak_bytes == 3
