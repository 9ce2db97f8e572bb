"""What all ranks must agree on after a step, in one small all-reduce: mean loss, requests to stop, changes.

On CUDA the result is copied without waiting and read one step later, so the host never stands still
for it; every rank reads it at the same step and so acts on it at the same step. What else a step leaves on
the device comes the same way: sent to the host before the mark of the step, read after it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed
from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.probes.hostcopy import send_to_host
from llmtop.trainer.worker.stopping import StopRequest

_SLOTS = 6


class Agreed(Struct, frozen=True, kw_only=True):
    loss: float | None
    """Mean over the step's micro-batches and all ranks; None when it is not finite."""
    stop: bool
    save: bool
    change: int = 0
    """Number of the setting that every rank has been asked to go over to; 0 for none."""
    checkpoint: int = 0
    """Number of the checkpoint that every rank has been asked for, while it goes on; 0 for none."""
    snapshot: int = 0
    """Number of the snapshot that every rank has been asked for; 0 for none."""


class Pending(Protocol):
    """A reduction under way."""

    def mark(self) -> None:
        """At the step's end: all that was asked of the device so far is done when `read` returns."""
        ...

    def read(self) -> Agreed:
        """Wait for the mark if the device is not there yet; for nothing that was asked for after it."""
        ...


class Agreement:
    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size

    def post(
        self,
        loss_sum: torch.Tensor,
        micro_batches: int,
        request: StopRequest,
        change: int = 0,
        checkpoint: int = 0,
        snapshot: int = 0,
    ) -> Pending:
        """Collective: every rank calls it once at the end of each step.

        `change` is the number of a setting that this rank has seen and does not have yet. One is under way at
        a time, so counting the ranks that have seen any is enough; so with `checkpoint` and `snapshot`.
        """
        mean = loss_sum / (micro_batches * self._world_size)
        if self._world_size == 1:
            own = Agreed(
                loss=None,
                stop=request.stop,
                save=request.save,
                change=change,
                checkpoint=checkpoint,
                snapshot=snapshot,
            )
            return _Alone(mean, own)
        asked = _Asked(change, checkpoint, snapshot)
        seen = (request.stop, request.save, *(number > 0 for number in asked))
        flags = torch.tensor([0.0, *map(float, seen)], dtype=torch.float32)
        if self._device.type == "cuda":
            flags = flags.pin_memory().to(self._device, non_blocking=True)
        flags[0] = mean
        torch.distributed.all_reduce(flags)
        kind = _OnCuda if self._device.type == "cuda" else _OnCpu
        return kind(flags, self._world_size, asked)

    def now(self, request: StopRequest, change: int = 0) -> Agreed:
        """The same question outside a step, answered at once."""
        pending = self.post(torch.zeros((), device=self._device), 1, request, change)
        pending.mark()
        return pending.read()


class _Alone:
    """Where there is nobody to agree with, only the loss is under way."""

    def __init__(self, loss: torch.Tensor, agreed: Agreed) -> None:
        self._loss: Any = send_to_host(loss)
        self._agreed = agreed
        self._reached = torch.cuda.Event() if loss.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        if self._reached is not None:
            self._reached.record()

    def read(self) -> Agreed:
        if self._reached is not None:
            self._reached.synchronize()
        return replace(self._agreed, loss=_finite(float(self._loss)))


class _Asked(NamedTuple):
    """Numbers of what this rank has seen and not done; 0 for none."""

    change: int
    checkpoint: int
    snapshot: int


class _OnCpu:
    def __init__(self, reduced: torch.Tensor, world_size: int, asked: _Asked) -> None:
        self._reduced = reduced
        self._world_size = world_size
        self._asked = asked

    def mark(self) -> None:
        """Nothing: on the CPU work is done when the call returns."""

    def read(self) -> Agreed:
        loss, stop, save, *seen = self._reduced.tolist()
        agreed = _Asked(
            *(
                number if ranks == self._world_size else 0
                for number, ranks in zip(self._asked, seen, strict=True)
            )
        )
        return Agreed(loss=_finite(loss), stop=stop > 0, save=save > 0, **agreed._asdict())


class _OnCuda:
    def __init__(self, reduced: torch.Tensor, world_size: int, asked: _Asked) -> None:
        self._world_size = world_size
        self._asked = asked
        self._host = torch.empty(_SLOTS, dtype=torch.float32, pin_memory=True)
        self._host.copy_(reduced, non_blocking=True)
        self._reached = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._reached.record()

    def read(self) -> Agreed:
        self._reached.synchronize()
        return _OnCpu(self._host, self._world_size, self._asked).read()


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
