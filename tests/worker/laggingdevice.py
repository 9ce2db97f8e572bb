"""A device that lags behind the host, in place of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmtop.trainer.worker import agreement, loop

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


@pytest.fixture(name="device")
def lagging_device(monkeypatch: pytest.MonkeyPatch) -> Device:
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
