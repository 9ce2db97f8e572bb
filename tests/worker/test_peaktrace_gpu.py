"""The allocator's trace on a real GPU, without DeepSpeed: replayed to the byte of torch's own counters."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtop.profiler.memory.result import Component
from llmtop.profiler.probes.allocator import AllocatorCounters
from llmtop.profiler.probes.peaktrace import Replay, Seen, Span, TransientSizes, phase_peak
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.probes.stepwatch import now_us
from llmtop.profiler.probes.tracer import CudaTracer
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import AnyEvent, PeakClassified
from tests.worker.tiny_training import Shape, Tiny, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KIB = 1 << 10


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Recording:
    """A trace with its borders, as the probe takes them."""

    def __init__(self) -> None:
        torch.zeros(1, device=device())
        self.tracer = CudaTracer(device())
        torch.cuda.reset_peak_memory_stats()
        self.tracer.start()
        self.first = self.tracer.counters().events
        self._border, self._border_us = 0, now_us()
        self.spans: list[Span] = []
        self.at_borders: list[AllocatorCounters] = []

    def border(self) -> None:
        counters, now = self.tracer.counters(), now_us()
        state = counters.events - self.first
        self.spans.append(
            Span(phase="forward", first=self._border, last=state, began_us=self._border_us, ended_us=now)
        )
        self.at_borders.append(counters)
        torch.cuda.reset_peak_memory_stats()
        self._border, self._border_us = state, now


def churn(rng: random.Random, held: dict[int, torch.Tensor], times: int) -> None:
    for _ in range(times):
        if held and rng.random() < 0.45:
            del held[rng.choice(sorted(held))]
        else:
            tensor = torch.empty(rng.randrange(1, 6000 * KIB), dtype=torch.uint8, device=device())
            held[tensor.data_ptr()] = tensor


@pytest.mark.parametrize("seed", range(5))
def test_the_replay_is_the_allocators_own_count(seed: int) -> None:
    rng, held = random.Random(seed), dict[int, torch.Tensor]()
    churn(rng, held, 100)
    recording = Recording()
    lives: list[dict[int, int]] = []
    for _ in range(4):
        churn(rng, held, 200)
        recording.border()
        lives.append({address: tensor.numel() for address, tensor in held.items()})
    requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
    replay = Replay(recording.tracer.stop())
    assert replay.totals[-1] == requested
    for span, counters, live in zip(recording.spans, recording.at_borders, lives, strict=True):
        assert replay.totals[replay.peak_state(span.first, span.last)] == counters.requested_peak_bytes
        alive = {life.address: life.size_bytes for life in replay.alive(span.last)}
        assert live.items() <= alive.items()
        assert sum(alive.values()) == replay.totals[span.last]


def test_the_hosts_clock_and_the_traces_agree() -> None:
    recording = Recording()
    for _ in range(200):
        torch.empty(1000, device=device())
        recording.border()
    replay = Replay(recording.tracer.stop())
    assert replay.clock_shift_us(recording.spans) == pytest.approx(0, abs=50)


def test_an_address_that_is_used_again_at_once_keeps_its_names_apart() -> None:
    recording, seen = Recording(), list[Seen]()
    names = (Component.PARAMETERS, Component.ACTIVATIONS, Component.GRADIENTS)
    addresses = set()
    for name in names:
        tensor = torch.empty(3_000_000, dtype=torch.uint8, device=device())
        seen.append(Seen(now_us(), tensor.data_ptr(), 3_000_000, name))
        addresses.add(tensor.data_ptr())
        # An operator, and a wait for it, so that the birth of the next one is some microseconds away.
        tensor.fill_(1)
        torch.cuda.synchronize()
        del tensor
        recording.border()
    replay = Replay(recording.tracer.stop())
    assert len(addresses) == 1
    for name, span in zip(names, recording.spans, strict=True):
        assert phase_peak(replay, span, seen, TransientSizes()).components[name] == 3_000_000


def test_what_another_stream_still_uses_is_active_and_not_alive() -> None:
    gc.collect()
    size, times = 10 << 20, 20
    # Memory and kernels are there already, so that nothing below waits for the device.
    ready = [torch.empty(size, dtype=torch.uint8, device=device()).fill_(1) for _ in range(times)]
    del ready
    torch.cuda.synchronize()
    recording = Recording()
    before = recording.tracer.counters()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        # So that what follows on this stream is still to be done at the first border.
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    for _ in range(times):
        tensor = torch.empty(size, dtype=torch.uint8, device=device())
        with torch.cuda.stream(side):
            tensor.fill_(2)
        tensor.record_stream(side)
        del tensor
    recording.border()
    torch.cuda.synchronize()
    recording.border()
    # Completed frees are noticed at the next allocation.
    kept = torch.empty(512, dtype=torch.uint8, device=device())
    recording.border()
    replay = Replay(recording.tracer.stop())
    assert kept.numel() == 512
    alive = [replay.totals[replay.peak_state(span.first, span.last)] for span in recording.spans]
    assert [each - replay.totals[0] for each in alive] == [size, 0, 512]
    active = [replay.active_peak_bytes(span.first, span.last) for span in recording.spans]
    assert active == [counters.requested_peak_bytes for counters in recording.at_borders]
    assert active[0] - before.requested_bytes == times * size
    assert replay.active_totals[-1] - replay.totals[-1] == replay.active_totals[0] - replay.totals[0]
    # A large block keeps at most 1 MiB that nobody asked for.
    rounding = before.allocated_bytes - replay.totals[0]
    for counters, peak in zip(recording.at_borders, alive, strict=True):
        assert 0 <= counters.allocated_peak_bytes - peak - rounding <= 1 << 20


def test_nothing_is_recorded_after_the_end() -> None:
    recording = Recording()
    recording.tracer.stop()
    torch.empty(1000, device=device())
    traces = torch.cuda.memory._snapshot()["device_traces"]
    assert sum(len(entries) for entries in traces) == 0


SHAPE = Shape(vocab=32_000, hidden=1024, batch=4, length=512, blocks=8)


def trained(checkpointed: str | None, steps: int) -> tuple[list[PeakClassified], list[StepReading]]:
    # What an earlier training left in reference cycles would be alive and have no name.
    gc.collect()
    torch.manual_seed(0)
    module = Tiny(SHAPE, checkpointed).to(device())
    optimizer = torch.optim.AdamW(module.parameters())
    engine: Any = SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer)
    events: list[AnyEvent] = []
    probes = TrainingProbes(
        engine, device=device(), vocab_size=SHAPE.vocab, classify_every=0, emit=events.append
    )
    readings = [train_step(probes, engine, step, device()) for step in range(1, steps + 1)]
    probes.close()
    return [event for event in events if isinstance(event, PeakClassified)], readings


@pytest.mark.parametrize("checkpointed", [None, "plain", "reentrant"])
def test_a_training_has_every_peak_explained(checkpointed: str | None) -> None:
    events, _ = trained(checkpointed, 2)
    assert [(event.step, event.phase) for event in events] == [
        (step, phase) for step in (1, 2) for phase in ("forward", "backward", "optimizer")
    ]
    for event in events:
        assert event.replay_error_bytes == 0, event
        assert 0 <= event.unnamed_bytes <= 0.01 * event.total_bytes, event
        assert event.components["parameters"] == SHAPE.weight_bytes
    backward, optimizer = events[4], events[5]
    logits = 4 * SHAPE.tokens * SHAPE.vocab
    assert backward.moment == "loss_backward"
    assert backward.components["logits"] >= 2 * logits
    assert optimizer.components["gradients"] == SHAPE.weight_bytes
    assert optimizer.components["optimizer_state"] == pytest.approx(2 * SHAPE.weight_bytes, abs=4096)


def test_recomputation_holds_less() -> None:
    kept = {name: trained(name, 2)[0][3].components["activations"] for name in (None, "plain")}
    assert kept["plain"] < 0.75 * kept[None]


@pytest.mark.parametrize("checkpointed", [None, "plain", "reentrant"])
def test_a_traced_step_holds_no_more_than_another(checkpointed: str | None) -> None:
    _, readings = trained(checkpointed, 4)
    for phase in ("forward", "backward", "optimizer"):
        watched, *others = [reading.phase_memory[phase].peak_bytes for reading in readings[1:]]
        assert watched is not None
        for other in others:
            assert watched == pytest.approx(other, rel=0.005), phase
