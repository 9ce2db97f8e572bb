"""Letter, colour and short name of each thing that is drawn in a stacked bar."""

from __future__ import annotations

from typing import NamedTuple

from llmtop.profiler.memory.result import Component
from llmtop.profiler.record.stepevents import BETWEEN


class Swatch(NamedTuple):
    letter: str
    colour: str
    label: str


COMPONENTS: dict[str, Swatch] = {
    Component.PARAMETERS: Swatch("P", "#7aa2d6", "parameters"),
    Component.GRADIENTS: Swatch("G", "#8fc7a3", "gradients"),
    Component.OPTIMIZER_STATE: Swatch("O", "#d9a66c", "optimizer"),
    Component.MASTER_PARAMETERS: Swatch("M", "#c9b26b", "master params"),
    Component.ACTIVATIONS: Swatch("A", "#b294c9", "activations"),
    Component.LOGITS: Swatch("L", "#d68fa8", "logits"),
    Component.COMMUNICATION_BUFFERS: Swatch("C", "#6cb8b8", "comm buffers"),
    Component.WORKSPACE: Swatch("W", "#a3b56e", "workspace"),
    Component.ROUNDING: Swatch("E", "#8f9a76", "block ends"),
    Component.FRAGMENTATION: Swatch("F", "#9c8f80", "fragmentation"),
    Component.CUDA_CONTEXT: Swatch("X", "#8b95a5", "CUDA context"),
    Component.NCCL: Swatch("N", "#7d9aa8", "NCCL"),
    Component.LOADED_KERNELS: Swatch("K", "#a3968b", "kernels"),
    Component.RUNTIME: Swatch("R", "#7f8c9b", "runtime"),
    Component.OTHER_PROCESSES: Swatch("Q", "#6b7280", "other procs"),
    Component.UNEXPLAINED: Swatch("?", "#c98080", "unexplained"),
}
"""By the value of `Component`."""

PHASES: dict[str, Swatch] = {
    "data": Swatch("D", "#8b95a5", "data"),
    BETWEEN: Swatch("E", "#a3968b", "between"),
    "forward": Swatch("F", "#7aa2d6", "forward"),
    "backward": Swatch("B", "#b294c9", "backward"),
    "optimizer": Swatch("O", "#d9a66c", "optimizer"),
}
"""By the value of `events.Phase`, in the order of a step; `BETWEEN` is of scripts alone."""

REST = Swatch("·", "#6b7280", "rest")
"""Of a step: what no phase covers."""


def component(name: str) -> Swatch:
    """A component that a newer writer added still gets its own name."""
    return COMPONENTS.get(name, Swatch("+", "#6b7280", name.replace("_", " ")))
