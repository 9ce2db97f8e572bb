"""What a run's model is called: as its spec has it, of a script by what was found in its processes."""

from __future__ import annotations

from llmtop.presets.spec import UNSEEN, RunSpec
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.units import format_count


def model_name(spec: RunSpec, state: RunState) -> str:
    """In a word; of a script whose model's shape is not known the class of its module."""
    if spec.model.family != UNSEEN:
        return spec.model.name
    built = state.first.model if state.first is not None else None
    if built is not None:
        return built.module_class or "not told"
    return "not seen" if state.status in ENDED else spec.model.name


def model_words(spec: RunSpec, state: RunState) -> str:
    """The same; where a class is all that is known, with its parameters, which tell two of a class apart."""
    name = model_name(spec, state)
    built = state.first.model if state.first is not None else None
    if spec.model.family != UNSEEN or built is None:
        return name
    size = f"{format_count(built.params)} parameters"
    return size if built.module_class is None else f"{name}, {size}"
