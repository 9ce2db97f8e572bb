"""Watches training by a torch optimizer without an engine: plain loops, transformers' Trainer, accelerate.

Found at the end of the first step, in which nothing was seen; the second one is the first that is told.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from llmtop.profiler.probes.script.found import found_model, hf_config, unwrapped
from llmtop.profiler.probes.script.joining import join
from llmtop.profiler.probes.script.shapes import batch_shape
from llmtop.profiler.probes.script.steps import Steps
from llmtop.profiler.probes.script.watching import Watched
from llmtop.profiler.record.scriptevents import RankAttached

_FIRST_TOLD = 2


class PlainEngine:
    """Module and optimizer under the names that the probes know them by."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        self.module = module
        self.optimizer = optimizer
        self.basic_optimizer = optimizer


def attach_optimizer(optimizer: Any) -> None:
    """Watch the training that this optimizer is of, from its next step on."""
    watched = Watched.here()
    if watched is not None:
        watched.guarded(_attach, optimizer, watched)


def trained_module(optimizer: Any) -> torch.nn.Module:
    """The outermost module that holds all that the optimizer trains. Raises LookupError where none does.

    Looked for once, among everything that the interpreter keeps: an optimizer knows its tensors only.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    holders: list[torch.nn.Module] = [
        module
        for module in gc.get_objects()
        # Not isinstance, which asks strange objects for their class: some warn of their age at that.
        if issubclass(type(module), torch.nn.Module)
        and trained <= {id(parameter) for parameter in module.parameters()}
    ]
    inside = {id(child) for module in holders for child in module.modules() if child is not module}
    outermost = [module for module in holders if id(module) not in inside]
    if not outermost:
        raise LookupError("no module holds the parameters that the optimizer trains")
    return outermost[0]


def _attach(optimizer: Any, watched: Watched) -> None:
    module = trained_module(optimizer)
    model = unwrapped(module)
    attached = RankAttached(
        pid=os.getpid(),
        world_size=_world_size(),
        framework="torch",
        hf_config=hf_config(model),
        found=found_model(model, optimizer),
    )
    device = next(module.parameters()).device
    engine = PlainEngine(module, optimizer)
    steps = join(watched, engine, model, attached, device, first_step=_FIRST_TOLD)
    _Hooks(module, optimizer, watched, steps)


class _Hooks:
    """Torch's own hooks around the outermost module and the optimizer, and a wrapper around `backward`.

    How many micro-batches make a step shows only when the step is made, so the one before tells.
    """

    def __init__(self, module: Any, optimizer: Any, watched: Watched, steps: Steps) -> None:
        self._watched = watched
        self._steps = steps
        self._optimizer = optimizer
        self._accumulated = 1
        for handle in (
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ):
            watched.undo_with(handle.remove)
        self._backward: Callable[..., Any] = torch.autograd.backward
        torch.autograd.backward = self._watched_backward
        watched.undo_with(lambda: setattr(torch.autograd, "backward", self._backward))

    def _before_forward(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._watched.guarded(self._begin_forward, module, given, named)

    def _begin_forward(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self._steps.disturb()
            return
        last = self._steps.micro_batches + 1 >= self._accumulated
        self._steps.begin_forward(batch_shape(given, named), last=last)

    def _after_forward(self, *_: Any) -> None:
        self._watched.guarded(self._steps.end)

    def _watched_backward(self, tensors: Any, *given: Any, **named: Any) -> Any:
        last = self._steps.micro_batches >= self._accumulated
        self._watched.guarded(self._steps.begin_backward, last=last)
        answer = self._backward(tensors, *given, **named)
        self._watched.guarded(self._steps.end_backward, tensors)
        return answer

    def _before_step(self, *_: Any) -> None:
        self._watched.guarded(self._steps.begin_optimizer, last=True)

    def _after_step(self, *_: Any) -> None:
        self._watched.guarded(self._finish)

    def _finish(self) -> None:
        self._steps.end()
        self._accumulated = max(1, self._steps.micro_batches)
        rate = self._optimizer.param_groups[0].get("lr")
        self._steps.finish(learning_rate=None if rate is None else float(rate))


def _world_size() -> int:
    distributed = torch.distributed
    up = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if up else 1
