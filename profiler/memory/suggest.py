"""Changes that would make a run fit, or use the room that it leaves, in the order of what they cost."""

from __future__ import annotations

from collections.abc import Callable

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction, Suggestion


def suggestions(
    spec: RunSpec, prediction: Prediction, predict: Callable[[RunSpec], Prediction]
) -> tuple[Suggestion, ...]:
    return ()
