"""What a run's GPUs are called: by their preset, or that nobody knows them yet."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec

NO_ANSWER = "no answer"
"""In a narrow column, of GPUs whose driver has not told which they are."""


def gpu_words(spec: RunSpec) -> str:
    """The GPU's name; where its driver has not answered since the launch, that."""
    return spec.gpu.name if spec.knows("gpu") else f"{spec.gpu.name} (the driver has not answered)"
