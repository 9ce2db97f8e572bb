"""The probes in the steps of a training: what they read when, and that they never stop it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from llmtop.profiler.memory.result import Component
from llmtop.profiler.probes import phases, training
from llmtop.profiler.probes.phases import CpuPhaseTimer
from llmtop.profiler.probes.readings import ReadingRate
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import UNREAD_STEPS, AnyEvent, MemoryClassified
from tests.worker.bare_engine import bare_engine

CPU = torch.device("cpu")


def train_steps(probes: TrainingProbes, engine: Any, steps: int, first: int = 1) -> Iterator[StepReading]:
    for step in range(first, first + steps):
        probes.begin_step(step)
        with probes.phase("forward", last=True):
            loss = engine.module(torch.ones(2, 16)).sum()
        with probes.phase("backward", last=True):
            loss.backward()
        with probes.phase("optimizer", last=True):
            engine.basic_optimizer.step()
            engine.basic_optimizer.zero_grad()
        yield probes.finish_step()


PHASES = {"forward", "backward", "optimizer"}


def test_a_step_that_is_not_read_still_has_its_times() -> None:
    engine = bare_engine(torch.nn.Linear(16, 8))
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=4, emit=lambda _: None)
    # Steps this short leave no time for readings, but the first and those that are classified are read.
    readings = list(train_steps(probes, engine, 9))
    assert [set(reading.phase_memory) - {UNREAD_STEPS} for reading in readings[:5]] == [PHASES] * 5
    assert readings[8 - 1].phase_memory.keys() == PHASES | {UNREAD_STEPS}
    assert readings[9 - 1].phase_memory == {} and readings[9 - 1].memory_every > 1
    for reading in readings:
        times = reading.times
        assert times is not None and set(times.phase_seconds()) == PHASES
        assert 0 < sum(seconds or 0 for seconds in times.phase_seconds().values()) <= times.step_seconds()


def test_a_phase_lasts_from_the_end_of_the_one_before_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a step is classified, read or neither."""
    now = [0.0]
    monkeypatch.setattr(phases, "perf_counter", lambda: now[0])
    engine = bare_engine(torch.nn.Linear(16, 8))
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=8, emit=lambda _: None)
    for step in range(1, 10):
        probes.begin_step(step)
        now[0] += 3.0
        with probes.phase("forward", last=True):
            now[0] += 4.0
        now[0] += 5.0
        with probes.phase("backward", last=True):
            pass
        times = probes.finish_step().times
        assert times is not None
        assert times.phase_seconds() == {"forward": 7.0, "backward": 5.0}, step


def test_a_clock_that_fails_is_off_and_stops_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bare_engine(torch.nn.Linear(16, 8))
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=0, emit=lambda _: None)
    assert all(reading.times for reading in train_steps(probes, engine, 7))

    def broken(*_: object) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(CpuPhaseTimer, "stop", broken)
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=0, emit=lambda _: None)
    with caplog.at_level(logging.ERROR):
        readings = list(train_steps(probes, engine, 8))
    assert not any(reading.times for reading in readings)
    assert caplog.text.count("the probe of times failed in step 1 and is off from here on") == 1


def test_a_script_s_tensors_are_counted_less_often_where_that_takes_much_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "perf_counter", itertools.count().__next__)  # a second each time
    engine, seen = bare_engine(torch.nn.Linear(16, 8)), list[AnyEvent]()
    probes = TrainingProbes(
        engine, device=CPU, vocab_size=99, classify_every=4, sparing=True, emit=seen.append
    )
    list(train_steps(probes, engine, 9))
    assert probes.classify_every == 40
    assert {event.step for event in seen if isinstance(event, MemoryClassified)} == {1, 2}


def test_where_nothing_but_times_is_taken_marks_do_until_something_else_is_to_be_taken() -> None:
    """As the worker's loop makes its steps, saves between two of them, and is changed."""
    engine, seen = bare_engine(torch.nn.Linear(16, 8)), list[AnyEvent]()
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=1000, emit=seen.append)
    list(train_steps(probes, engine, 8))
    between: dict[int, Callable[[], None]] = {10: probes.settle, 20: partial(probes.change, classify_every=7)}
    marked = list[int]()
    for step in range(9, 40):
        if step in between:
            between[step]()
        plain = probes.begin_step(step)
        if plain is None:
            with probes.phase("forward", last=True):
                pass
            reading = probes.finish_step()
            times = reading.times
        else:
            keep, mark = plain.marks
            keep(("data", mark()))
            keep(("forward", mark()))
            times, reading = plain.finish_step(), plain.reading
            marked.append(step)
        assert bool(reading.phase_memory) == (plain is None), step
        assert times is not None
        assert times.phase_seconds().keys() == ({"forward"} if plain is None else {"data", "forward"})
    assert {9, 11, 19, 22, 23} <= set(marked) and not {10, 20, 21, 28, 35} & set(marked)
    classified = {event.step for event in seen if isinstance(event, MemoryClassified)}
    assert classified == {1, 2, 20, 21, 28, 35}


@pytest.mark.parametrize("asks_always", [True, False], ids=["worker", "script"])
def test_marks_that_cost_much_are_made_in_some_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, asks_always: bool
) -> None:
    """As on CUDA: in the first steps of a process and after a change, then in every fifth."""
    monkeypatch.setattr(CpuPhaseTimer, "borders_every", 5)
    engine = bare_engine(torch.nn.Linear(16, 8))
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=0, emit=lambda _: None)

    def told(steps: range) -> set[int]:
        """Those whose phases are; each tells its own time."""
        found, plain = set[int](), None
        for step in steps:
            if plain is not None and step < plain.until and not asks_always:
                plain.start_step()
            else:
                plain = probes.begin_step(step)
            if plain is None:
                with probes.phase("forward", last=True):
                    pass
                times = probes.finish_step().times
            else:
                keep, mark = plain.marks_of(step)
                keep(("forward", mark()))
                times = plain.finish_step()
            assert times is not None and times.step_seconds() > 0
            if times.phase_seconds():
                assert (times.phase_seconds()["forward"] or 0) > 0
                found.add(step)
        return found

    fifths = set(range(0, 200, 5))
    assert told(range(3, 60)) == {*range(3, 23), *fifths & {*range(23, 60)}}, "20 from the first on"
    probes.change(classify_every=0)
    assert told(range(60, 99)) == {*range(60, 80), *fifths & {*range(80, 99)}}
    probes.settle()
    assert told(range(99, 131)) == fifths & {*range(99, 131)}, (
        "that this rank alone looks at one tells no more"
    )


def test_which_steps_are_marked_hangs_on_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that mark unlike steps would tell of unlike times."""
    monkeypatch.setattr(CpuPhaseTimer, "borders_every", 5)
    found = []
    for seconds in (0.01, 30.0):
        monkeypatch.setattr(ReadingRate, "step_seconds", seconds)
        probes = TrainingProbes(
            bare_engine(torch.nn.Linear(16, 8)),
            device=CPU,
            vocab_size=99,
            classify_every=0,
            emit=lambda _: None,
        )
        told = set[int]()
        for step in range(1, 200):
            plain = probes.begin_step(step)
            if plain is not None:
                keep, mark = plain.marks_of(step)
                keep(("forward", mark()))
                times = plain.finish_step()
            else:
                with probes.phase("forward", last=True):
                    pass
                times = probes.finish_step().times
            if times is not None and times.phase_seconds():
                told.add(step)
        found.append(told)
    assert found[0] == found[1] == {*range(1, 21), *range(25, 200, 5)}


def test_a_clock_that_fails_between_two_steps_leaves_them_without_times(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bare_engine(torch.nn.Linear(16, 8))
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=0, emit=lambda _: None)
    list(train_steps(probes, engine, 8))
    assert probes.begin_step(9) is not None and probes.finish_step().times is not None

    def broken(*_: object) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(CpuPhaseTimer, "start_step", broken)
    with caplog.at_level(logging.ERROR):
        assert [probes.begin_step(step) for step in (10, 11, 12)] == [None] * 3
        assert all(reading.times is None for reading in train_steps(probes, engine, 3, first=13))
    assert caplog.text.count("the probe of times failed in step 10 and is off from here on") == 1


def test_plain_steps_last_until_one_is_looked_at_and_nobody_is_asked_between() -> None:
    engine, seen = bare_engine(torch.nn.Linear(16, 8)), list[AnyEvent]()
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=8, emit=seen.append)
    list(train_steps(probes, engine, 8))
    step, looked_at, passed = 9, list[int](), 0
    while step < 64:
        plain = probes.begin_step(step)
        if plain is None:
            with probes.phase("forward", last=True):
                pass
            assert probes.finish_step().phase_memory, step
            looked_at.append(step)
            step += 1
            continue
        assert step < plain.until <= step + 8 - step % 8
        passed += int(plain.until) - step
        for later in range(step, int(plain.until)):
            keep, mark = plain.marks
            keep(("forward", mark()))
            times = plain.finish_step()
            assert times is not None and times.phase_seconds().keys() == {"forward"}, "of this step alone"
            if later + 1 < plain.until:
                plain.start_step()
        step = int(plain.until)
    assert passed + len(looked_at) == step - 9
    assert {16, 24, 32, 40, 48, 56} <= set(looked_at)
    assert {event.step for event in seen if isinstance(event, MemoryClassified)} >= {16, 24, 32, 40, 48, 56}


def test_steps_1_and_2_and_every_nth_are_classified_at_four_moments() -> None:
    engine, seen = bare_engine(torch.nn.Linear(16, 8)), list[AnyEvent]()
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=4, emit=seen.append)
    assert all(reading.phase_memory for reading in list(train_steps(probes, engine, 6))[:5])
    moments = [(event.step, event.moment) for event in seen if isinstance(event, MemoryClassified)]
    names = ["end_of_forward", "first_block_backward", "optimizer_step", "between_steps"]
    assert moments == [(step, name) for step in (1, 2, 4) for name in names]
    inside = next(e for e in seen if isinstance(e, MemoryClassified) and e.moment == "optimizer_step")
    assert inside.components[Component.OPTIMIZER_STATE] > inside.components[Component.GRADIENTS] > 0


def test_the_first_steps_of_a_process_are_classified_whatever_their_numbers() -> None:
    """One that goes on from a checkpoint, or after a relaunch on another setting, would else show nothing."""
    engine, seen = bare_engine(torch.nn.Linear(16, 8)), list[AnyEvent]()
    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=20, emit=seen.append)
    list(train_steps(probes, engine, 5, first=41))
    assert {event.step for event in seen if isinstance(event, MemoryClassified)} == {41, 42}


def test_a_probe_that_fails_says_so_once_and_stays_off(caplog: pytest.LogCaptureFixture) -> None:
    engine = bare_engine(torch.nn.Linear(16, 8))

    def broken(_: AnyEvent) -> None:
        raise RuntimeError("the disk is full")

    probes = TrainingProbes(engine, device=CPU, vocab_size=99, classify_every=1, emit=broken)
    with caplog.at_level(logging.ERROR):
        readings = list(train_steps(probes, engine, 3))
    assert all(set(reading.phase_memory) == PHASES for reading in readings)
    assert [record.getMessage() for record in caplog.records] == [
        "the probe of classification failed in step 1 and is off from here on"
    ]
    assert "the disk is full" in caplog.text
