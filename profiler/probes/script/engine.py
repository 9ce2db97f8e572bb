"""Watches a DeepSpeed engine through its own three calls."""

from __future__ import annotations

from typing import Any

import torch

from llmtop.profiler.probes.enginefacts import loss_scale
from llmtop.profiler.probes.script.shapes import BatchShapes
from llmtop.profiler.probes.script.steps import StepFacts, Steps
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
        self._is_last = False
        self._rate: float | None = None
        """Of the step that the engine is about to make."""
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
                share = 1 / self._accumulated if named.get("scale_wrt_gas", True) else 1.0
                steps.end_backward(loss, share=share)
            except Exception as error:  # noqa: BLE001 - likewise
                watched.turn_off(error)
        return answer

    def step(self, *given: Any, **named: Any) -> Any:
        watched = self._watched
        if watched.off:
            return self._own["step"](*given, **named)
        try:
            self._begin_step()
        except Exception as error:  # noqa: BLE001 - likewise
            watched.turn_off(error)
        answer = self._own["step"](*given, **named)
        if not watched.off:
            try:
                self._end_step()
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

    def _begin_step(self) -> None:
        # Asked before: the call itself counts the micro-batch.
        self._is_last = bool(self._engine.is_gradient_accumulation_boundary())
        # An engine with a schedule of its own sets the next step's rate in this very call.
        rates = self._engine.get_lr() if self._is_last else None
        self._rate = float(rates[0]) if rates else None
        self._steps.begin_optimizer(last=self._is_last)

    def _end_step(self) -> None:
        self._steps.end()
        if not self._is_last:
            return
        engine = self._engine
        self._steps.finish(
            StepFacts(
                learning_rate=self._rate,
                grad_norm=engine.get_global_grad_norm(),
                loss_scale=loss_scale(engine) if self._is_scaled else None,
                skipped=not engine.was_step_applied(),
            )
        )

    def _put_back(self, name: str) -> None:
        """The class's own method is found again."""
        self._engine.__dict__.pop(name, None)
