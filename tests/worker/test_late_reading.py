"""The loop on a device that lags behind the host: nothing waits for more than its own step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from llmtop.profiler.probes import hostcopy
from llmtop.profiler.probes.due import Marking
from llmtop.profiler.probes.phases import CudaPhaseTimer
from llmtop.profiler.probes.stepreading import PlainSteps, StepReading
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import AnyEvent, Phase, StepFinished
from llmtop.trainer.worker import agreement, loop
from llmtop.trainer.worker.callbacks import StepLog, StepOutcome, StepReporter
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest
from tests.worker.laggingdevice import CUDA, Device, Number, lagging_device  # noqa: F401

STEPS = 5


class Probes:
    """The timer of CUDA, as the probes use it."""

    def __init__(self) -> None:
        self._timer = CudaPhaseTimer(CUDA)

    def begin_step(self, step: int) -> PlainSteps | None:
        """In every other one nothing but times is taken."""
        timer = self._timer
        timer.start_step()
        if step % 2 == 0:
            return None
        seen = StepReading(times=None, phase_memory={})
        return PlainSteps(timer.marks(), Marking(), timer.finish_step, timer.start_step, step + 1, seen)

    @contextmanager
    def phase(self, phase: Phase, *, last: bool) -> Iterator[None]:
        self._timer.start()
        yield
        self._timer.stop(phase)

    def finish_step(self) -> StepReading:
        return StepReading(times=self._timer.finish_step(), phase_memory={})


class Ahead:
    """How far the device was when a step was told."""

    def __init__(self, device: Device, events: list[AnyEvent]) -> None:
        self._device = device
        self._events = events
        self.steps_queued: list[int] = []
        self.ends: list[int] = []

    def after_step(self, step: int) -> None:
        self.ends.append(len(self._device.queued))

    def after_outcome(self, outcome: StepOutcome) -> None:
        assert self._device.done <= self.ends[outcome.step - 1], "a later step was waited for"
        self.steps_queued.append(len(self.ends) - outcome.step)

    def at_end(self, step: int, *, save_asked: bool) -> None:
        """Nothing."""


def engine(device: Device, norm: Callable[[float], Any], overflows_in: int = 0) -> Any:
    """Its loss is the step's number, its norm what `norm` makes of ten times that."""
    made = SimpleNamespace(steps=0, last=True, optimizer=None, basic_optimizer=object())

    def forward(**_: Any) -> Any:
        device.ask()
        return SimpleNamespace(loss=torch.tensor(made.steps + 1.0))

    def step() -> None:
        made.steps += made.last
        device.ask()

    class Engine:
        optimizer, basic_optimizer = made.optimizer, made.basic_optimizer
        __call__ = staticmethod(forward)

        def __getattr__(self, name: str) -> Any:
            applied = made.steps != overflows_in
            return lambda *_: {"get_lr": [0.5], "fp16_enabled": False, "was_step_applied": applied}.get(name)

        def set_gradient_accumulation_boundary(self, last: bool) -> None:
            made.last = last

        def step(self) -> None:
            step()

        def get_global_grad_norm(self) -> Any:
            return norm(math.inf if made.steps == overflows_in else 10.0 * made.steps)

    return Engine()


def on_device(norm: float) -> torch.Tensor:
    return torch.tensor(norm).as_subclass(Number)


@pytest.mark.parametrize("norm", [on_device, float, torch.tensor], ids=["device", "number", "offloaded"])
@pytest.mark.parametrize("grad_accum", [1, 3])
@pytest.mark.parametrize("overflows_in", [0, 3], ids=["", "one overflows"])
def test_each_late_reading_lands_on_its_own_step_and_waits_for_no_later_one(
    device: Device, tmp_path: Path, norm: Callable[[float], Any], grad_accum: int, overflows_in: int
) -> None:
    told: list[AnyEvent] = []
    sizes = SimpleNamespace(micro_batch=1, grad_accum=grad_accum, seq_len=4)
    spec: Any = SimpleNamespace(options=sizes, world_size=1)
    ahead = Ahead(device, told)
    with EventWriter(tmp_path / "events.jsonl", "rank0") as events:
        run = loop.Loop(
            engine(device, norm, overflows_in),
            SimpleNamespace(next_micro_batch=lambda: numpy.zeros((1, 4), dtype="int64")),  # type: ignore[arg-type]
            device=torch.device("cpu"),
            world_size=1,
            grad_accum=grad_accum,
            probes=Probes(),
            callbacks=(StepReporter(spec, 0, lambda make: told.append(make()), StepLog(STEPS, 0)), ahead),
            stages=StageLog(events),
            stop=StopRequest(),
        )
        run._lag = 1
        run.run(1, STEPS)
    steps = [event for event in told if isinstance(event, StepFinished)]
    numbers = range(1, STEPS + 1)
    assert [event.loss for event in steps] == [float(number) for number in numbers]
    norms = {number: 10.0 * number if number != overflows_in else None for number in numbers}
    assert {event.step: event.grad_norm for event in steps} == norms
    assert [event.step for event in steps if event.skipped] == [overflows_in] * (overflows_in > 0)
    assert ahead.steps_queued == [1] * (STEPS - 1) + [0], "the host is a step ahead, but for the last"
    assert all(event.step_seconds > 0 and len(event.phase_seconds) == 4 for event in steps)


@pytest.mark.parametrize(("loss", "told"), [(6.0, 2.0), (float("nan"), None)])
def test_one_rank_agrees_with_itself_without_a_collective(loss: float, told: float | None) -> None:
    """There is no process group here."""
    request = StopRequest()
    request.stop = True
    agreed = agreement.Agreement(torch.device("cpu"), 1)
    pending = agreed.post(torch.tensor(loss), 3, request, change=7)
    pending.mark()
    assert pending.read() == agreement.Agreed(loss=told, stop=True, save=False, change=7)
    assert agreed.now(StopRequest()) == agreement.Agreed(loss=0.0, stop=False, save=False)


def test_a_number_of_the_host_is_not_sent() -> None:
    number = torch.tensor(2.0)
    assert hostcopy.send_to_host(number) is number
    assert hostcopy.send_to_host(None) is None and hostcopy.send_to_host(1.5) == 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_number_is_there_after_its_mark() -> None:
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    sent = hostcopy.send_to_host(torch.full((), 3.0, device="cuda"))
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    event.synchronize()
    assert isinstance(sent, torch.Tensor) and sent.device.type == "cpu" and float(sent) == 3.0
    last = torch.cuda.Event()  # type: ignore[no-untyped-call]
    last.record()
    still_busy = not last.query()  # type: ignore[no-untyped-call]
    assert still_busy, "the host waited for what was asked for later"
