"""The loop on a device that lags behind the host: nothing waits for more than its own step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from llmtop.profiler.probes import hostcopy, training
from llmtop.profiler.probes.due import Marking
from llmtop.profiler.probes.phases import PHASES, CudaPhaseTimer, StepTimes
from llmtop.profiler.probes.script.steps import Steps
from llmtop.profiler.probes.stepreading import PlainSteps, StepReading
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import AnyEvent, Phase, StepFinished
from llmtop.trainer.worker import agreement, loop
from llmtop.trainer.worker.callbacks import StepLog, StepOutcome, StepReporter
from llmtop.trainer.worker.stages import StageLog
from llmtop.trainer.worker.stopping import StopRequest

STEPS = 5
CUDA = torch.device("cuda", 0)


class Device:
    """A queue of what the host asked for; it works only when somebody waits for a place in it."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.done = 0
        self.events = 0
        """Made so far."""

    def ask(self, work: Any = None) -> int:
        self.queued.append(work)
        return len(self.queued)

    def reach(self, place: int) -> None:
        for work in self.queued[self.done : place]:
            if work is not None:
                work()
        self.done = max(self.done, place)


class Number(torch.Tensor):
    """Of the device: whoever asks it for its value waits for all that is queued."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("the host waited for the device")

    item = tolist = __float__ = __bool__ = __int__ = _refuse


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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """In place of CUDA: its events, pinned buffers and what is sent to them."""
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.place = 0
            device.events += 1

        def record(self, stream: Any = None) -> None:
            self.place = device.ask()

        def synchronize(self) -> None:
            assert self.place, "an event that was never recorded"
            device.reach(self.place)

        def elapsed_time(self, end: Event) -> float:
            assert end.place <= device.done, "read before the device was there"
            return float(end.place - self.place)

    def send(number: Any) -> Any:
        if not isinstance(number, Number):
            return number
        host = torch.full((), -1.0)
        value = number.as_subclass(torch.Tensor).clone()
        device.ask(lambda: host.copy_(value))
        return host

    class OnDevice(agreement._OnCpu):
        """The copy of the reduction, which is the host's business here."""

        def __init__(self, reduced: torch.Tensor, world_size: int, asked: agreement._Asked) -> None:
            sent = send(reduced.sum().as_subclass(Number)).expand(agreement._SLOTS)
            super().__init__(sent, world_size, asked)
            self._event = Event()

        def mark(self) -> None:
            self._event.record()

        def read(self) -> agreement.Agreed:
            self._event.synchronize()
            return agreement.Agreed(loss=float(self._reduced[0]), stop=False, save=False)

    def post(
        self: agreement.Agreement, loss_sum: torch.Tensor, micro_batches: int, *_: Any
    ) -> agreement.Pending:
        return OnDevice(loss_sum / micro_batches, 1, agreement._Asked(0, 0, 0))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch._C, "_CudaEventBase", Event)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", Number._refuse)
    monkeypatch.setattr(agreement.Agreement, "post", post)
    monkeypatch.setattr(loop, "send_to_host", send)
    return device


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


def test_events_are_used_again_when_nobody_can_read_them_and_not_before(device: Device) -> None:
    timer = CudaPhaseTimer(CUDA)

    def step(work: int, *, begin: Callable[[], None] = timer.start_step) -> StepTimes:
        begin()
        for phase in PHASES:
            for _ in range(work):
                device.ask()
            timer.stop(phase)
        return timer.finish_step()

    unread = [step(work) for work in range(4)]
    made = device.events
    device.reach(len(device.queued))
    last = unread.pop()
    unread.clear()
    for work in range(10, 20):
        times = step(work)
        device.reach(len(device.queued))
        assert times.phase_seconds() == dict.fromkeys(PHASES, (work + 1) / 1000), "of this step alone"
        assert times.step_seconds() == ((work + 1) * len(PHASES) + 1) / 1000
    assert device.events == made, "those of the steps that are over do for the coming ones"
    ended = times
    device.ask()
    for work in range(20, 40):
        before, times = times, step(work, begin=timer.go_on)
        device.reach(len(device.queued))
        # From the end of the one before, which goes on telling its own.
        seconds = [((asked + 1) * len(PHASES) + 1 + (asked == 20)) / 1000 for asked in (work - 1, work)]
        assert [before.step_seconds(), times.step_seconds()] == seconds
        assert times.phase_seconds()["data"] == (work + 1 + (work == 20)) / 1000
        if work == 24:
            made = device.events
    assert device.events == made, "an end that is a beginning too comes back once"
    assert ended.step_seconds() == (20 * len(PHASES) + 1) / 1000
    assert last.phase_seconds() == dict.fromkeys(PHASES, 4 / 1000), "whoever still reads finds his own"


def probes_on_device(monkeypatch: pytest.MonkeyPatch) -> TrainingProbes:
    """Real ones with the timer of CUDA, after the steps that are looked at closely."""
    monkeypatch.setattr(training, "phase_timer", lambda _: CudaPhaseTimer(CUDA))
    bare = SimpleNamespace(module=torch.nn.Linear(4, 4), optimizer=None, basic_optimizer=None)
    probes = TrainingProbes(
        bare, device=torch.device("cpu"), vocab_size=9, classify_every=0, emit=lambda _: None
    )
    monkeypatch.setattr(probes._memory, "is_due", lambda step: step < 3)
    monkeypatch.setattr(probes._memory, "next_due", lambda step: 3 if step < 3 else 1 << 30)
    for step in (1, 2):
        assert probes.begin_step(step) is None
        probes.finish_step()
    return probes


def test_what_is_done_between_two_steps_is_no_loading(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks, the ranks' agreement and writing are part of the step's time, and of no phase."""
    probes = probes_on_device(monkeypatch)
    for step in range(3, 60):
        plain = probes.begin_step(step)
        assert plain is not None
        keep, mark = plain.marks_of(step)
        for phase in PHASES:
            device.ask()
            keep((phase, mark()))
        times = plain.finish_step()
        device.reach(len(device.queued))
        assert times is not None
        marked = step <= 20 or step % 5 == 0
        assert times.phase_seconds() == (dict.fromkeys(PHASES, 2 / 1000) if marked else {}), step
        if step > 3:
            # Ten between the steps; four in phases, the marks and the step's last one.
            assert times.step_seconds() == (10 + 4 + (len(PHASES) + 1 if marked else 0) + 1) / 1000, step
        for _ in range(10):
            device.ask()


@pytest.mark.parametrize("fails_in", ["mark", "end"])
def test_an_event_that_fails_in_a_plain_step_ends_no_training(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails_in: str
) -> None:
    probes = probes_on_device(monkeypatch)
    plain = probes.begin_step(3)
    assert plain is not None
    good = torch._C._CudaEventBase.record

    def bad(*_: Any) -> None:
        raise RuntimeError("no event")

    keep, mark = plain.marks_of(3)
    for phase in PHASES:
        fails = fails_in == "mark" and phase == "forward"
        monkeypatch.setattr(torch._C._CudaEventBase, "record", bad if fails else good)
        keep((phase, mark()))
    monkeypatch.setattr(torch._C._CudaEventBase, "record", bad if fails_in == "end" else good)
    assert plain.finish_step() is None, "a step of which a border is missing has no times"
    for step in (4, 5):
        assert probes.begin_step(step) is None
        with probes.phase("forward", last=True):
            pass
        assert probes.finish_step().times is None
    assert caplog.text.count("the probe of times failed in step 3 and is off from here on") == 1
    assert "no event" in caplog.text


def test_of_a_script_too_an_event_that_fails_takes_the_times_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probes = probes_on_device(monkeypatch)
    told: list[StepFinished] = []
    around: Any = SimpleNamespace(
        begin_step=probes.begin_step, phase=probes.phase, finish_step=probes.finish_step, seen=lambda: 0
    )

    def hold(event: Callable[[], StepFinished]) -> None:
        device.reach(len(device.queued))
        told.append(event())

    events: Any = SimpleNamespace(hold=hold, write=lambda _: None)
    steps = Steps(probes, around, events, torch.device("cpu"), world_size=1, first_step=3)
    good = torch._C._CudaEventBase.record

    def bad(*_: Any) -> None:
        raise RuntimeError("no event")

    for number in range(3, 9):
        steps.begin_forward(None, last=True)
        steps.end()
        monkeypatch.setattr(torch._C._CudaEventBase, "record", bad if number == 5 else good)
        steps.begin_backward(last=True)
        steps.end_backward(torch.tensor(2.0))
        steps.begin_optimizer(last=True)
        steps.end()
        steps.finish()
    assert [event.step for event in told] == [*range(3, 9)] and {event.loss for event in told} == {2.0}
    assert [bool(event.phase_seconds) for event in told] == [True, True, False, False, False, False]
    assert caplog.text.count("the probe of times failed") == 1


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_that_follow_each_other_share_an_event_and_fill_the_time() -> None:
    timer = CudaPhaseTimer(torch.device("cuda"))
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    timer.start_step()
    steps: list[StepTimes] = []
    for number in range(6):
        if number:
            timer.go_on()
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        if number % 2:
            timer.stop("forward")
        steps.append(timer.finish_step())
    last.record()
    torch.cuda.synchronize()
    whole = first.elapsed_time(last) / 1000
    assert sum(times.step_seconds() for times in steps) == pytest.approx(whole, rel=0.05)
    assert [list(times.phase_seconds()) for times in steps] == [[], ["forward"]] * 3
    kept = steps[0].step_seconds()
    del steps[1:]
    for _ in range(6):
        timer.start_step()
        timer.finish_step()
    torch.cuda.synchronize()
    assert steps[0].step_seconds() == kept, "an event in use was recorded again"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_times_are_read_by_the_thread_that_writes() -> None:
    """It has no device of its own set, and must not wait for what was asked for later."""
    timer = CudaPhaseTimer(torch.device("cuda"))
    timer.start_step()
    for phase in PHASES:
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        timer.stop(phase)
    times = timer.finish_step()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    later = torch.cuda.Event()  # type: ignore[no-untyped-call]
    later.record()
    read: list[dict[str, float | None]] = []
    thread = threading.Thread(
        target=lambda: read.append({**times.phase_seconds(), "step": times.step_seconds()})
    )
    thread.start()
    thread.join()
    assert not later.query(), "the thread waited for what was asked for later"  # type: ignore[no-untyped-call]
    (seconds,) = read
    whole = seconds.pop("step")
    assert whole is not None and set(seconds) == set(PHASES)
    assert sum(part or 0.0 for part in seconds.values()) == pytest.approx(whole, rel=0.05)
