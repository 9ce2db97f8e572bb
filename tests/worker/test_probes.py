"""The probes on small modules: what they count, and that they never stop a training."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtop.profiler.memory.result import Component
from llmtop.profiler.probes import phases, training
from llmtop.profiler.probes.activations import ActivationCounter
from llmtop.profiler.probes.allocator import ResidentMeter, merge
from llmtop.profiler.probes.classify import classify, parameter_storages
from llmtop.profiler.probes.heap import read_heap
from llmtop.profiler.probes.phases import CpuPhaseTimer
from llmtop.profiler.probes.readings import ReadingRate
from llmtop.profiler.probes.resident import (
    peak_rss_bytes,
    pss_bytes,
    reset_peak_rss,
    resident_bytes,
    rss_bytes,
)
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import UNREAD_STEPS, AnyEvent, MemoryClassified, PhaseMemory

CPU = torch.device("cpu")
MIB = 1 << 20


def bare_engine(module: torch.nn.Module) -> Any:
    """As DeepSpeed at stage 0 in fp32: the optimizer is torch's own."""
    optimizer = torch.optim.AdamW(module.parameters())
    return SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer)


def test_a_bare_optimizer_is_classified_to_the_byte() -> None:
    module = torch.nn.Linear(16, 8)
    engine = bare_engine(module)
    size = 4 * (16 * 8 + 8)
    assert classify(engine, on_cpu=True).device == {"parameters": size}
    module(torch.ones(2, 16)).sum().backward()
    assert classify(engine, on_cpu=True).device == {"parameters": size, "gradients": size}
    engine.optimizer.step()
    held = classify(engine, on_cpu=True).device
    # Two moments, and a step counter of 4 bytes for each tensor.
    assert held == {"parameters": size, "gradients": size, "optimizer_state": 2 * size + 8}


def test_views_of_one_storage_count_once() -> None:
    module = torch.nn.Linear(16, 8, bias=False)
    flat = torch.zeros(256)
    module.weight.data = flat[:128].view(8, 16)
    engine = bare_engine(module)
    engine.optimizer = SimpleNamespace(bit16_groups_flat=[flat], optimizer=engine.basic_optimizer)
    assert classify(engine, on_cpu=True).device == {"parameters": 1024}


def test_without_a_gpu_kind_host_tensors_are_offloaded_ones() -> None:
    engine = bare_engine(torch.nn.Linear(4, 4, bias=False))
    found = classify(engine, on_cpu=False)
    assert (found.device, found.host) == ({}, {"parameters": 64})


def test_what_is_swapped_is_counted_in_its_buffers_and_files(tmp_path: Path) -> None:
    """As deepspeed 0.19.8 keeps it: within the step the first buffer holds the fp32 weights."""
    module = torch.nn.Linear(4, 4, bias=False)
    files = {name: tmp_path / name for name in ("master", "exp_avg", "exp_avg_sq", "weight", "kept")}
    for size, file in enumerate(files.values(), 1):
        file.write_bytes(b"x" * size)
    buffers = [torch.zeros(10), torch.zeros(10)]
    tensors = [SimpleNamespace(swap_path=str(files[name])) for name in ("master", "exp_avg", "exp_avg_sq")]
    tensors.append(SimpleNamespace(swap_path=str(tmp_path / "not yet")))
    wrapper = SimpleNamespace(
        optimizer_swapper=SimpleNamespace(
            swap_buffer_manager=SimpleNamespace(all_buffers=buffers),
            swap_params_info={"0_1": SimpleNamespace(tensors=tensors)},
        ),
        fp32_partitioned_groups_flat=[buffers[0][:6]],
    )
    weight: Any = module.weight
    weight.ds_id, weight.ds_tensor = 7, torch.zeros(1)
    weight.ds_tensor.final_location = "nvme"
    weight.nvme_swapper = SimpleNamespace(
        buffers=torch.zeros(100), partitioned_swap_buffer=None, id_to_path={7: str(files["weight"])}
    )
    engine = bare_engine(module)
    engine.optimizer = wrapper
    found = classify(engine, on_cpu=False)
    assert found.host == {"parameters": 68, "master_parameters": 40, "communication_buffers": 440}
    assert found.drive == {"parameters": 4, "master_parameters": 1, "optimizer_state": 5}
    weight.ds_tensor.final_location = "not-nvme"
    assert "parameters" not in classify(engine, on_cpu=False).drive


def test_nested_holders_of_buckets_are_read() -> None:
    engine = bare_engine(torch.nn.Linear(4, 4, bias=False))
    bucket = SimpleNamespace(buffer=[torch.zeros(10), torch.zeros(10)])
    engine.optimizer = SimpleNamespace(ipg_buckets={torch.float32: bucket}, averaged_gradients={0: [None]})
    assert classify(engine, on_cpu=True).device["communication_buffers"] == 80


def test_weights_that_are_being_gathered_are_buffers() -> None:
    engine = bare_engine(torch.nn.Linear(4, 4, bias=False))
    flat = torch.zeros(40)
    coalesced = SimpleNamespace(partitions=[flat[:20], flat[20:]], quantization=None)
    single = SimpleNamespace(_AllGatherHandle__param_buffer=torch.zeros(6))
    registry = {"a": coalesced, "b": coalesced, "c": SimpleNamespace(handles=[single])}
    coordinator = SimpleNamespace(_PartitionedParameterCoordinator__inflight_param_registry=registry)
    engine.optimizer = SimpleNamespace(parameter_offload=SimpleNamespace(param_coordinator=coordinator))
    assert classify(engine, on_cpu=True).device["communication_buffers"] == 184


def test_only_touched_pages_of_a_large_buffer_count() -> None:
    buffer = torch.empty(64 * MIB, dtype=torch.uint8)
    buffer[: 4 * MIB] = 1
    touched = resident_bytes(buffer.data_ptr(), buffer.numel())
    assert 4 * MIB <= touched <= 8 * MIB
    buffer.fill_(1)
    assert resident_bytes(buffer.data_ptr(), buffer.numel()) == 64 * MIB


def test_activations_are_counted_by_storage_without_weights() -> None:
    vocab, hidden, rows = 40, 16, 8
    module = torch.nn.Sequential(
        torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, vocab)
    )
    counter = ActivationCounter(vocab)
    inputs = torch.ones(rows, hidden)
    with counter.watching():
        loss = module(inputs).log_softmax(-1).sum()
    saved = counter.saved_bytes(parameter_storages(module))
    # The input of each layer; ReLU's result is the second one's input.
    assert saved.activations == 2 * rows * hidden * 4
    assert saved.logits == rows * vocab * 4
    loss.backward()
    reference = torch.nn.Sequential(*module)
    watched = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    reference(inputs).log_softmax(-1).sum().backward()
    for parameter, gradient in zip(module.parameters(), watched, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_phases_of_several_micro_batches_are_summed() -> None:
    timer = CpuPhaseTimer()
    timer.start_step()
    for _ in range(3):
        timer.start()
        timer.stop("forward")
    times = timer.finish_step()
    seconds = times.phase_seconds()
    assert set(seconds) == {"forward"}
    assert 0 < (seconds["forward"] or 0) <= times.step_seconds()


def test_the_peak_of_a_phase_outlives_its_memory() -> None:
    meter = ResidentMeter()
    meter.start_step()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert held.sum() > 0
    del held
    first = meter.stop_phase()
    second = meter.stop_phase()
    assert first.peak_bytes is not None and second.peak_bytes is not None
    assert first.peak_bytes >= second.peak_bytes + 32 * MIB
    peaks = meter.peaks()
    assert peaks.rss_bytes is not None and peaks.rss_bytes >= first.peak_bytes


def test_what_is_reached_between_two_steps_is_no_phase_s_peak() -> None:
    meter = ResidentMeter()
    meter.start_step()
    meter.stop_phase()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert held.sum() > 0
    del held
    meter.start_step()
    phase, run = meter.stop_phase().peak_bytes, meter.peaks().rss_bytes
    assert phase is not None and run is not None
    assert run >= phase + 32 * MIB


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_itself() -> None:
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    assert held.sum() > 0 and reset_peak_rss()
    mark, now = peak_rss_bytes(), rss_bytes()
    assert mark is not None and now is not None and abs(mark - now) < 32 * MIB
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # The parent's memory goes from the child alone.
        del held
        reset_peak_rss()
        os.write(writing, f"{rss_bytes()} {peak_rss_bytes()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    after, peak = map(int, os.read(reading, 100).split())
    os.close(reading)
    os.close(writing)
    assert after < now - 128 * MIB and peak < now - 128 * MIB


def test_a_phase_of_several_parts_keeps_the_latest_end_and_the_largest_peak() -> None:
    first = PhaseMemory(allocated_bytes=10, peak_bytes=90, reserved_bytes=None)
    second = PhaseMemory(allocated_bytes=20, peak_bytes=50, reserved_bytes=7)
    assert merge(None, first) is first
    assert merge(first, second) == PhaseMemory(allocated_bytes=20, peak_bytes=90, reserved_bytes=7)


def test_the_process_can_be_read() -> None:
    rss, pss, heap = rss_bytes(), pss_bytes(), read_heap()
    assert rss is not None and pss is not None and heap is not None
    assert 0 < pss <= rss * 1.1
    assert heap.used_bytes > MIB


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
