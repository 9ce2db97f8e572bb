"""What the probes count of small modules and of their process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtop.profiler.probes.activations import ActivationCounter
from llmtop.profiler.probes.allocator import ResidentMeter, merge
from llmtop.profiler.probes.classify import classify, parameter_storages
from llmtop.profiler.probes.heap import read_heap
from llmtop.profiler.probes.phases import CpuPhaseTimer
from llmtop.profiler.probes.resident import (
    peak_rss_bytes,
    pss_bytes,
    reset_peak_rss,
    resident_bytes,
    rss_bytes,
)
from llmtop.profiler.record.events import PhaseMemory
from tests.worker.bare_engine import bare_engine

CPU = torch.device("cpu")
MIB = 1 << 20


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
