"""Times of a device that lags behind: each is of its own step, and what fails of them stops nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtop.profiler.probes import training
from llmtop.profiler.probes.phases import PHASES, CudaPhaseTimer, StepTimes
from llmtop.profiler.probes.script.steps import Steps
from llmtop.profiler.probes.training import TrainingProbes
from llmtop.profiler.record.events import StepFinished
from tests.worker.laggingdevice import CUDA, Device, lagging_device  # noqa: F401


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
