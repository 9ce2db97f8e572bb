"""Step time."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec


def predict_step_seconds(spec: RunSpec) -> float | None:
    return None
