"""The profiler over real micro-batches: it tells attentions apart, and changes no training."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import LlamaConfig, LlamaForCausalLM

from llmtop.profiler.probes import kernels
from llmtop.profiler.probes.kernels import KernelRecorder, collect, profiled_step
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import AnyEvent, KernelsSeen
from llmtop.trainer.worker.kernels import enable_checkpointing

CPU = torch.device("cpu")
LAYERS = 2
STEP = 3


def tiny_model(attention: str, *, recompute: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    if recompute:
        enable_checkpointing(model, reentrant=False)
    return model.train()


def train(
    model: Any, *, records: bool, steps: int = 4, grad_accum: int = 2
) -> tuple[list[AnyEvent], list[bool]]:
    """The loop in small; events, and which steps were marked."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = SimpleNamespace(module=model, optimizer=optimizer, basic_optimizer=optimizer)
    events: list[AnyEvent] = []
    probes = TrainingProbes(
        engine,
        device=CPU,
        vocab_size=128,
        classify_every=0,
        kernel_step=STEP,
        records_kernels=records,
        emit=events.append,
    )
    ids = torch.arange(32).reshape(2, 16)
    marks = []
    for step in range(1, steps + 1):
        probes.begin_step(step)
        for micro in range(grad_accum):
            last = micro == grad_accum - 1
            with probes.phase("forward", last=last):
                loss = model(input_ids=ids, labels=ids).loss
            with probes.phase("backward", last=last):
                loss.backward()
            with probes.phase("optimizer", last=last):
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        marks.append(probes.finish_step().profiled)
    return events, marks


def kernels_of(events: list[AnyEvent]) -> KernelsSeen:
    (seen,) = [event for event in events if isinstance(event, KernelsSeen)]
    return seen


@pytest.fixture(autouse=True)
def no_profiler_is_left_on() -> Iterator[None]:
    yield
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("attention", "ran"), [("sdpa", "sdpa_flash_cpu"), ("eager", "unfused")])
@pytest.mark.parametrize("recompute", [False, True])
def test_attention_and_recomputation_show_in_what_ran(attention: str, ran: str, recompute: bool) -> None:
    events, marks = train(tiny_model(attention, recompute=recompute), records=True)
    seen = kernels_of(events)
    assert marks == [False, False, True, False]
    assert (seen.step, seen.attention, seen.loss) == (STEP, ran, "torch_cross_entropy")
    assert seen.attention_calls == LAYERS * (2 if recompute else 1)
    assert seen.optimizer is not None and seen.optimizer.startswith("torch_")
    assert seen.liger == () and seen.quantization == ()
    assert 0 < sum(kernel.seconds for kernel in seen.top) <= seen.total_seconds


def test_recording_changes_no_weight_to_the_bit() -> None:
    plain, recorded = tiny_model("sdpa"), tiny_model("sdpa")
    train(plain, records=False)
    train(recorded, records=True)
    for one, two in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(one, two)


def test_ranks_that_do_not_record_mark_the_step_all_the_same() -> None:
    events, marks = train(tiny_model("sdpa"), records=False)
    assert marks == [False, False, True, False]
    assert not any(isinstance(event, KernelsSeen) for event in events)


@pytest.mark.parametrize("broken", ["start", "stop"])
def test_a_profiler_that_fails_is_told_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail(recorder: KernelRecorder) -> None:
        recorder._profile = None
        raise RuntimeError("CUPTI is used by another tool")

    if broken == "stop":
        monkeypatch.setattr(KernelRecorder, "start", lambda recorder: setattr(recorder, "_profile", object()))
    monkeypatch.setattr(KernelRecorder, broken, fail)
    with caplog.at_level(logging.ERROR):
        events, marks = train(tiny_model("sdpa"), records=True)
    assert len(marks) == 4
    assert not any(isinstance(event, KernelsSeen) for event in events)
    assert "the probe of kernels failed in step 3" in caplog.text


class Record:
    """One record of the profiler, made by hand."""

    def __init__(
        self, name: str, start: int, duration: int, *, thread: int = 1, device: Any = DeviceType.CPU
    ) -> None:
        self._values = (name, start, duration, thread, device)

    def name(self) -> str:
        return str(self._values[0])

    def start_ns(self) -> int:
        return self._values[1]

    def duration_ns(self) -> int:
        return self._values[2]

    def start_thread_id(self) -> int:
        return self._values[3]

    def device_type(self) -> Any:
        return self._values[4]


def test_an_operators_time_is_without_those_that_it_called() -> None:
    records = [
        Record("outer", 0, 100),
        Record("inner", 10, 30),
        Record("innermost", 15, 10),
        Record("inner", 50, 20),
        Record("outer", 200, 5),
        Record("elsewhere", 20, 40, thread=2),
    ]
    nanoseconds = {k.name: (round(k.seconds * 1e9), k.calls) for k in collect(records, on_cpu=True)}
    assert nanoseconds == {
        "outer": (55, 2),
        "inner": (40, 2),
        "innermost": (10, 1),
        "elsewhere": (40, 1),
    }


def test_on_a_gpu_the_calls_of_its_runtime_are_no_kernels() -> None:
    records = [
        Record("cudaLaunchKernel", 0, 9),
        Record("gemm", 5, 100, device=DeviceType.CUDA),
        Record("gemm", 50, 100, device=DeviceType.CUDA),
    ]
    (kernel,) = collect(records, on_cpu=False)
    assert (kernel.name, round(kernel.seconds * 1e9), kernel.calls) == ("gemm", 200, 2)


def test_a_gpu_is_asked_for_kernels_alone_and_cupti_is_taken_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[ProfilerActivity]] = []
    records = [Record("gemm", 5, 100, device=DeviceType.CUDA), Record("cudaLaunchKernel", 0, 9)]

    def fake_profile(activities: list[ProfilerActivity]) -> Any:
        asked.append(activities)
        results = SimpleNamespace(events=lambda: records)
        return SimpleNamespace(
            start=lambda: None, stop=lambda: None, profiler=SimpleNamespace(kineto_results=results)
        )

    monkeypatch.setattr(kernels, "profile", fake_profile)
    monkeypatch.setenv("TEARDOWN_CUPTI", "")  # so that it is put back whatever it was
    monkeypatch.delenv("TEARDOWN_CUPTI")
    recorder = KernelRecorder(torch.device("cuda"))
    recorder.start()
    assert os.environ["TEARDOWN_CUPTI"] == "1"
    assert [kernel.name for kernel in recorder.stop()] == ["gemm"]
    assert not recorder.running
    assert asked == [[ProfilerActivity.CUDA]]


@given(st.integers(0, 300), st.integers(1, 250), st.integers(0, 300), st.integers(0, 5))
def test_the_profiled_step_is_a_step_of_the_run_and_not_a_classified_one(
    asked: int, first: int, more: int, every: int
) -> None:
    def classified(step: int) -> bool:
        return step in (1, 2) or (every > 0 and step % every == 0)

    last = first + more - 1
    step = profiled_step(asked, first, last, classified)
    free = [step for step in range(first, last + 1) if not classified(step)]
    if asked == 0 or not free:
        assert step is None
    else:
        assert step in free


def test_a_shorter_run_is_profiled_in_its_last_step_and_a_resumed_one_counts_anew() -> None:
    def never(step: int) -> bool:
        return False

    assert profiled_step(3, 1, 60, never) == 3
    assert profiled_step(5, 1, 4, never) == 4
    assert profiled_step(3, 21, 60, never) == 23
    assert profiled_step(3, 61, 60, never) is None
