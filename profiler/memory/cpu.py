"""Prediction for the CPU kind: what each rank's process will hold."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction


def cpu_prediction(spec: RunSpec) -> Prediction:
    """Predict the resident set of one rank's process, and the machine's total."""
    raise NotImplementedError
