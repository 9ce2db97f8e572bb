"""The peak probe on small trainings on the CPU, whose every storage is counted by a dispatch mode."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtop.profiler.memory.result import Component
from llmtop.profiler.probes.peaks import PeakProbe, logits_sizes
from llmtop.profiler.probes.stepwatch import StepWatch
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import AnyEvent, PeakClassified
from tests.worker.dispatch_tracer import DispatchTracer
from tests.worker.tiny_training import Shape, Tiny, token_ids, train_step

CPU = torch.device("cpu")
SHAPE = Shape()
WEIGHTS = SHAPE.weight_bytes


def traced(
    checkpointed: str | None = None, *, steps: int = 3, classify_every: int = 0
) -> tuple[list[PeakClassified], list[torch.Tensor]]:
    torch.manual_seed(0)
    module = Tiny(SHAPE, checkpointed)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    engine: Any = SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer)
    events: list[AnyEvent] = []
    tracer = DispatchTracer()
    with tracer:
        for parameter in module.parameters():
            tracer.adopt(parameter)
        probes = TrainingProbes(
            engine,
            device=CPU,
            vocab_size=SHAPE.vocab,
            classify_every=classify_every,
            tracer=tracer,
            emit=events.append,
        )
        for step in range(1, steps + 1):
            train_step(probes, engine, step, CPU)
    return [event for event in events if isinstance(event, PeakClassified)], list(module.parameters())


@pytest.mark.parametrize("checkpointed", [None, "reentrant", "plain"])
def test_every_byte_of_every_peak_has_a_name(checkpointed: str | None) -> None:
    events, _ = traced(checkpointed)
    assert [(event.step, event.phase) for event in events] == [
        (step, phase) for step in (1, 2) for phase in ("forward", "backward", "optimizer")
    ]
    for event in events:
        assert event.replay_error_bytes == 0
        assert sum(event.components.values()) + event.unnamed_bytes == event.total_bytes
        # The loss itself, and the gradient that backward starts with, live across a border.
        assert event.unnamed_bytes <= 16, (event, event.largest_unnamed)
        assert event.components["parameters"] == WEIGHTS
        assert event.components["rounding"] == 1


def test_the_backward_peak_of_a_wide_vocabulary_is_the_loss() -> None:
    events, _ = traced()
    backward = events[4]
    assert (backward.step, backward.phase, backward.moment) == (2, "backward", "loss_backward")
    # The log-probabilities that were kept, and the gradient of the logits.
    assert backward.components["logits"] >= 2 * 4 * SHAPE.tokens * SHAPE.vocab


def test_the_optimizer_step_holds_gradients_and_both_moments() -> None:
    events, parameters = traced()
    held = events[5].components
    assert held["gradients"] == WEIGHTS
    assert held["optimizer_state"] == 2 * WEIGHTS + 4 * len(parameters)


def test_a_bucket_that_lives_in_the_backward_pass_only_is_a_buffer() -> None:
    """As ZeRO-1/2 have it: made after the first gradient, gone with the last."""
    module, size, tracer = Tiny(SHAPE, None), 100_000, DispatchTracer()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    wrapper = SimpleNamespace(optimizer=optimizer, ipg_buckets=list[torch.Tensor]())
    engine: Any = SimpleNamespace(module=module, optimizer=wrapper, basic_optimizer=optimizer)

    def after_gradient(parameter: torch.Tensor) -> None:
        if parameter is module.embedding.weight:
            wrapper.ipg_buckets.clear()
        elif not wrapper.ipg_buckets:
            wrapper.ipg_buckets.append(torch.empty(size, dtype=torch.uint8))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(after_gradient)  # type: ignore[no-untyped-call]
    events: list[AnyEvent] = []
    with tracer:
        for parameter in module.parameters():
            tracer.adopt(parameter)
        probes = TrainingProbes(
            engine, device=CPU, vocab_size=SHAPE.vocab, classify_every=0, tracer=tracer, emit=events.append
        )
        train_step(probes, engine, 1, CPU)
    (backward,) = (e for e in events if isinstance(e, PeakClassified) and e.phase == "backward")
    assert backward.components["communication_buffers"] == size
    assert backward.unnamed_bytes <= 16


def test_recomputation_is_named_and_smaller_than_keeping_everything() -> None:
    kept = {name: traced(name)[0][3].components["activations"] for name in (None, "plain", "reentrant")}
    assert kept["plain"] < kept[None]
    assert kept["reentrant"] < kept[None]


def test_a_later_sampled_step_is_traced_only_if_the_peak_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    events, _ = traced(steps=6, classify_every=3)
    assert {event.step for event in events} == {1, 2}
    monkeypatch.setattr("llmtop.profiler.probes.peaks.PeakProbe.is_due", lambda self, highest: True)
    events, _ = traced(steps=6, classify_every=3)
    assert {event.step for event in events} == {1, 2, 3, 6}


def test_a_trace_never_begins_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak that makes one due may be that of the same step's forward pass."""
    asked: list[int] = []

    def due_after_the_first_phase(self: PeakProbe, highest: int) -> bool:
        asked.append(highest)
        return len(asked) > 1

    monkeypatch.setattr("llmtop.profiler.probes.peaks.PeakProbe.is_due", due_after_the_first_phase)
    events, _ = traced(steps=3, classify_every=3)
    assert {event.step for event in events} == {1, 2}
    assert len(asked) == 1


def test_what_8_bit_products_keep_for_backward_is_activations() -> None:
    class Linear8bitLt(torch.nn.Linear):
        """Like that of bitsandbytes: its input stays in the graph as a plain attribute."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            made = super().forward(hidden.detach())
            made.kept = hidden  # type: ignore[attr-defined]
            return made

    module = torch.nn.Sequential(torch.nn.Linear(4, 8), Linear8bitLt(8, 4))
    watch = StepWatch(module, CPU, vocab_size=9)
    watch.attach()
    kept = module[0](torch.ones(2, 4))
    module[1](kept)
    watch.detach()
    names = {(one.address, one.component) for one in watch.seen}
    assert (kept.untyped_storage().data_ptr(), Component.ACTIVATIONS) in names
    assert not module[1]._forward_pre_hooks


def test_a_trace_is_due_when_the_peak_is_larger_than_the_traced_one() -> None:
    tracer, module = DispatchTracer(), torch.nn.Linear(2, 2)
    probe = PeakProbe(module, tracer, device=CPU, vocab_size=9, hidden_size=None, emit=lambda event: None)
    assert probe.is_due(0)
    tracer.current = 1_000_000
    probe.begin(1)
    probe.end_phase("forward")
    probe.finish()
    assert not probe.is_due(1_000_500)
    assert probe.is_due(1_100_000)


def test_steps_between_the_sampled_ones_hook_and_trace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Tiny(SHAPE, None)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    engine: Any = SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer)
    tracer = DispatchTracer()
    probes = TrainingProbes(
        engine, device=CPU, vocab_size=SHAPE.vocab, classify_every=0, tracer=tracer, emit=lambda _: None
    )
    for step in (1, 2):
        train_step(probes, engine, step, CPU)
    calls: list[str] = []
    for target in (
        "llmtop.profiler.probes.stepwatch.StepWatch.attach",
        "llmtop.profiler.probes.stepwatch.StepWatch.see",
        "llmtop.profiler.probes.activations.ActivationCounter.watching",
        "llmtop.profiler.probes.training.classify",
        "tests.worker.dispatch_tracer.DispatchTracer.start",
        "tests.worker.dispatch_tracer.DispatchTracer.counters",
    ):
        monkeypatch.setattr(target, lambda *_, name=target, **__: calls.append(name))
    for step in range(3, 6):
        train_step(probes, engine, step, CPU)
    assert calls == []
    assert not module._forward_pre_hooks
    assert all(not parameter._backward_hooks for parameter in module.parameters())


def test_hooks_are_gone_after_a_traced_step_and_gradients_are_the_same() -> None:
    _, watched = traced(steps=2)
    torch.manual_seed(0)
    module = Tiny(SHAPE, None)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for _ in range(2):
        module(token_ids(SHAPE, CPU)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for seen, plain in zip(watched, module.parameters(), strict=True):
        assert torch.equal(seen, plain)
        assert not seen._backward_hooks


@pytest.mark.parametrize("checkpointed", [None, "plain", "reentrant"])
def test_closed_probes_leave_nothing_that_keeps_the_engine(checkpointed: str | None) -> None:
    gc.collect()
    gc.disable()
    try:
        module = Tiny(SHAPE, checkpointed)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        engine: Any = SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer)
        tracer = DispatchTracer()
        with tracer:
            probes = TrainingProbes(
                engine,
                device=CPU,
                vocab_size=SHAPE.vocab,
                classify_every=0,
                tracer=tracer,
                emit=lambda _: None,
            )
            for step in range(1, 4):
                train_step(probes, engine, step, CPU)
        probes.close()
        assert not optimizer._optimizer_step_post_hooks
        left = [weakref.ref(kept) for kept in (module, optimizer, probes, *module.parameters())]
        del probes, engine, optimizer, module, tracer
        assert [kept() for kept in left] == [None] * len(left)
    finally:
        gc.enable()


def test_probes_are_closed_in_the_middle_of_a_trace() -> None:
    module, tracer = Tiny(SHAPE, None), DispatchTracer()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    engine: Any = SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=optimizer)
    probes = TrainingProbes(
        engine, device=CPU, vocab_size=SHAPE.vocab, classify_every=0, tracer=tracer, emit=lambda _: None
    )
    probes.begin_step(1)
    with probes.phase("data", last=True):
        recording = tracer.recording
        assert recording and module._forward_pre_hooks
    probes.close()
    probes.close()
    assert not tracer.recording
    assert not module._forward_pre_hooks
    assert all(not parameter._backward_hooks for parameter in module.parameters())


def test_watching_a_gradient_does_not_copy_it() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    seen: list[int] = []
    handle = weight.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: seen.append(gradient.untyped_storage().data_ptr())
    )
    (weight * torch.ones(8)).sum().backward()  # type: ignore[no-untyped-call]
    handle.remove()
    assert weight.grad is not None
    # AccumulateGrad takes over a gradient that nobody else holds; a copy would have another address.
    assert seen == [weight.grad.untyped_storage().data_ptr()]


def test_a_trace_that_fails_ends_the_recording_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(_: DispatchTracer) -> None:
        raise RuntimeError("events were lost")

    abandoned: list[bool] = []
    monkeypatch.setattr(DispatchTracer, "stop", lost)
    monkeypatch.setattr(DispatchTracer, "abandon", lambda _: abandoned.append(True))
    with caplog.at_level(logging.ERROR):
        events, _ = traced()
    assert events == []
    assert abandoned == [True]
    assert "the probe of peak failed in step 1" in caplog.text


def test_sizes_of_logits_know_shifts_and_chunks() -> None:
    sizes = logits_sizes((4, 8), 100, 16)
    # 32 tokens, 28 shifted ones; Liger: ceil(100 / 16) = 7 chunks of ceil(32 / 7) = 5, up to 8.
    for rows in (32, 28, 8, 4):
        assert {rows * 100 * 2, rows * 100 * 4} <= sizes
    assert logits_sizes((), 100, 16) == frozenset()
