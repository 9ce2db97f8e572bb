"""Watches a DeepSpeed engine through its own three calls."""

from __future__ import annotations

from typing import Any

import torch

from llmtop.profiler.probes.enginefacts import learning_rate, loss_scale
from llmtop.profiler.probes.script.shapes import batch_shape
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
        self._own = {name: getattr(engine, name) for name in _CALLS}
        for name in _CALLS:
            setattr(engine, name, getattr(self, name))
            watched.undo_with(lambda name=name: self._put_back(name))  # type: ignore[misc]

    def forward(self, *given: Any, **named: Any) -> Any:
        if self._watched.off:
            return self._own["forward"](*given, **named)
        if not self._trains():
            self._steps.disturb()
            return self._own["forward"](*given, **named)
        last = self._steps.micro_batches + 1 >= self._accumulated
        shape = self._watched.guarded(batch_shape, given, named)
        return self._within(self._steps.forward(shape, last=last), "forward", *given, **named)

    def backward(self, loss: Any = None, *given: Any, **named: Any) -> Any:
        accumulated = self._accumulated
        # transformers' Trainer has divided it already, and says so (transformers 5.17 `trainer.py`).
        share = 1 / accumulated if named.get("scale_wrt_gas", True) else 1.0
        around = self._steps.backward(loss, last=self._steps.micro_batches >= accumulated, share=share)
        return self._within(around, "backward", loss, *given, **named)

    def step(self, *given: Any, **named: Any) -> Any:
        if self._watched.off:
            return self._own["step"](*given, **named)
        # Asked before: the call itself counts the micro-batch.
        last = bool(self._engine.is_gradient_accumulation_boundary())
        # An engine with a schedule of its own sets the next step's rate in this very call.
        rate = self._watched.guarded(learning_rate, self._engine) if last else None
        answer = self._within(self._steps.optimizer(last=last), "step", *given, **named)
        if last:
            self._watched.guarded(self._finish, rate)
        return answer

    def _within(self, around: Any, name: str, *given: Any, **named: Any) -> Any:
        """The engine's own call inside of a phase. What the call raises is the script's; what the phase does
        is ours."""
        if self._watched.off:
            return self._own[name](*given, **named)
        self._watched.guarded(around.__enter__)
        answer = self._own[name](*given, **named)
        self._watched.guarded(around.__exit__, None, None, None)
        return answer

    def _finish(self, rate: float | None) -> None:
        engine = self._engine
        self._steps.finish(
            StepFacts(
                learning_rate=rate,
                grad_norm=engine.get_global_grad_norm(),
                loss_scale=loss_scale(engine),
                skipped=not engine.was_step_applied(),
            )
        )

    @property
    def _accumulated(self) -> int:
        return int(self._engine.gradient_accumulation_steps())

    def _trains(self) -> bool:
        return bool(self._engine.module.training) and torch.is_grad_enabled()

    def _put_back(self, name: str) -> None:
        """The class's own method is found again."""
        self._engine.__dict__.pop(name, None)
