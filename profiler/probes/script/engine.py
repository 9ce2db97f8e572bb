"""Watches a DeepSpeed engine through its own three calls."""

from __future__ import annotations

from typing import Any

import torch

from llmtop.profiler.probes.enginefacts import loss_scale
from llmtop.profiler.probes.script.shapes import BatchShapes
from llmtop.profiler.probes.script.steps import Steps
from llmtop.profiler.probes.script.watching import Watched

_CALLS = ("forward", "backward", "step")


class EngineWatch:
    """Wraps `forward`, `backward` and `step` of one engine (deepspeed 0.19.8 `runtime/engine.py`).

    The wrappers call the engine's own method whatever happens around it, and only once.
    """

    def __init__(self, engine: Any, watched: Watched, steps: Steps) -> None:
        self._engine = engine
        self._watched = watched
        self._steps = steps
        self._module = engine.module
        self._shapes = BatchShapes()
        self._is_scaled = loss_scale(engine) is not None
        self._accumulated = 1
        """Micro-batches of a step, as of its newest forward pass."""
        self._own = {name: getattr(engine, name) for name in _CALLS}
        for name in _CALLS:
            setattr(engine, name, getattr(self, name))
            watched.undo_with(lambda name=name: self._put_back(name))  # type: ignore[misc]

    # What is done around a call runs on caches that the training has swept, where each frame costs a
    # microsecond or two: so `Watched.guarded` is written out.

    def forward(self, *given: Any, **named: Any) -> Any:
        watched = self._watched
        if watched.off:
            return self._own["forward"](*given, **named)
        begun = False
        try:
            begun = self._begin_forward(given, named)
        except Exception as error:  # noqa: BLE001 - told, and the script must go on
            watched.turn_off(error)
        answer = self._own["forward"](*given, **named)
        if begun and not watched.off:
            try:
                self._steps.end()
            except Exception as error:  # noqa: BLE001 - likewise
                watched.turn_off(error)
        return answer

    def backward(self, loss: Any = None, *given: Any, **named: Any) -> Any:
        watched = self._watched
        if watched.off:
            return self._own["backward"](loss, *given, **named)
        steps = self._steps
        try:
            steps.begin_backward(last=steps.micro_batches >= self._accumulated)
        except Exception as error:  # noqa: BLE001 - likewise
            watched.turn_off(error)
        answer = self._own["backward"](loss, *given, **named)
        if not watched.off:
            try:
                # transformers' Trainer has divided it already, and says so (transformers 5.17 `trainer.py`).
                whole = self._accumulated == 1 or not named.get("scale_wrt_gas", True)
                steps.end_backward(loss, share=1.0 if whole else 1 / self._accumulated)
            except Exception as error:  # noqa: BLE001 - likewise
                watched.turn_off(error)
        return answer

    def step(self, *given: Any, **named: Any) -> Any:
        watched = self._watched
        if watched.off:
            return self._own["step"](*given, **named)
        engine, steps = self._engine, self._steps
        last, rate = False, None
        try:
            # Asked before: the call itself counts the micro-batch.
            last = bool(engine.is_gradient_accumulation_boundary())
            if last:
                # An engine with a schedule of its own sets the next step's rate in this very call.
                rates = engine.get_lr()
                rate = float(rates[0]) if rates else None
            steps.begin_optimizer(last=last)
        except Exception as error:  # noqa: BLE001 - likewise
            watched.turn_off(error)
        answer = self._own["step"](*given, **named)
        if not watched.off:
            try:
                steps.end()
                if last:
                    steps.finish(
                        rate,
                        engine.get_global_grad_norm(),
                        loss_scale(engine) if self._is_scaled else None,
                        not engine.was_step_applied(),
                    )
            except Exception as error:  # noqa: BLE001 - likewise
                watched.turn_off(error)
        return answer

    def _begin_forward(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether it is of a training step."""
        if not (self._module.training and torch.is_grad_enabled()):
            self._steps.disturb()
            return False
        # A script may change it between two steps.
        self._accumulated = int(self._engine.gradient_accumulation_steps())
        last = self._steps.micro_batches + 1 >= self._accumulated
        self._steps.begin_forward(self._shapes.of(given, named), last=last)
        return True

    def _put_back(self, name: str) -> None:
        """The class's own method is found again."""
        self._engine.__dict__.pop(name, None)
