"""Time and saved bytes of every module over one step, by hooks that are on for that step alone.

Forward: from a module's call to its return. Backward: from the gradient that reaches its output to the one
that leaves by its first input. On CUDA both are events on the stream, read when the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct

from llmtop.profiler.probes.activations import is_weight, to_keep
from llmtop.profiler.probes.classify import parameter_storages
from llmtop.profiler.snapshots.modules import ModuleRow, by_kind

Mark = Any
"""A time: seconds, or an event of the device."""


class _Watched(Struct):
    """One module."""

    name: str
    module: torch.nn.Module
    began: list[Mark]
    """Of calls that are under way: a module may call itself."""
    forward: list[tuple[Mark, Mark]]
    backward_began: list[Mark]
    backward: list[tuple[Mark, Mark]]
    saved: dict[int, int]
    """Storages by address, with their bytes."""


class ModuleWatch:
    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._watched: list[_Watched] = []
        self._inside: list[_Watched] = []
        self._handles: list[Any] = []
        self._weights: set[int] = set()

    def start(self) -> None:
        self._weights = parameter_storages(self._model)
        for name, module in self._model.named_modules():
            each = _Watched(name or "(model)", module, [], [], [], [], {})
            self._watched.append(each)
            self._handles += (
                module.register_forward_pre_hook(self._before(each), with_kwargs=True),
                module.register_forward_hook(self._after(each), always_call=True),
            )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The forward pass of a micro-batch: what autograd keeps is counted, anew for each."""
        for each in self._watched:
            each.saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._keep, _as_it_is):
            yield
        self._inside.clear()

    def stop(self) -> tuple[ModuleRow, ...]:
        """Waits for the device."""
        self._take_off()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rows = [_row(each) for each in self._watched]
        self._watched = []
        return by_kind(rows)

    def abandon(self) -> None:
        self._take_off()
        self._watched = []

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._inside.clear()

    def _before(self, each: _Watched) -> Callable[..., None]:
        def hook(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._inside.append(each)
            reached = _differentiable((*given, *named.values()))
            if reached is not None:
                _when_gradient_comes(reached, lambda: self._backward_ended(each))
            each.began.append(self._mark())

        return hook

    def _after(self, each: _Watched) -> Callable[..., None]:
        def hook(_: Any, given: Any, answer: Any) -> None:
            if each.began:
                each.forward.append((each.began.pop(), self._mark()))
            if self._inside and self._inside[-1] is each:
                self._inside.pop()
            values = answer.values() if isinstance(answer, dict) else answer
            reached = _differentiable(values if isinstance(values, Iterable) else (values,))
            if reached is not None:
                _when_gradient_comes(reached, lambda: each.backward_began.append(self._mark()))

        return hook

    def _backward_ended(self, each: _Watched) -> None:
        if each.backward_began:
            each.backward.append((each.backward_began.pop(), self._mark()))

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._weights and not is_weight(tensor):
            for each in self._inside:
                each.saved[address] = storage.nbytes()
        return to_keep(tensor)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _differentiable(values: Iterable[Any] | torch.Tensor) -> torch.Tensor | None:
    """The first tensor of a call through which a gradient goes."""
    found = (values,) if isinstance(values, torch.Tensor) else values
    return next((one for one in found if isinstance(one, torch.Tensor) and one.requires_grad), None)


def _when_gradient_comes(tensor: torch.Tensor, then: Callable[[], None]) -> None:
    """The gradient itself stays as it is."""

    def hook(_: torch.Tensor) -> None:
        then()

    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _seconds(marks: list[tuple[Mark, Mark]]) -> float:
    return float(
        sum(
            end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
            for begin, end in marks
        )
    )


def _row(each: _Watched) -> ModuleRow:
    return ModuleRow(
        name=each.name,
        kind=type(each.module).__name__,
        calls=len(each.forward),
        forward_seconds=_seconds(each.forward),
        backward_seconds=_seconds(each.backward) if each.backward else None,
        parameter_bytes=sum(_held_bytes(parameter) for parameter in each.module.parameters()),
        saved_bytes=sum(each.saved.values()),
    )


def _held_bytes(parameter: torch.nn.Parameter) -> int:
    """That this rank holds of a weight: under ZeRO-3 its shard, else all of it."""
    shard = getattr(parameter, "ds_tensor", None)
    held = parameter if shard is None else shard
    return int(held.numel() * held.element_size())
