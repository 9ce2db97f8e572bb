"""What the command line and the plan screen do alike on the way from typed values to layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtop.presets.errors import UsageError
from llmtop.presets.paths import expand_user, is_hub_id
from llmtop.presets.resolve import Layer, Machine
from llmtop.presets.spec import RunSpec, ValueSource

if TYPE_CHECKING:
    from llmtop.trainer.dsimport.problem import Problem

_PATHS = ("nvme_path", "data", "tokenizer", "deepspeed_config")
_NO_PATHS = ("auto", "bytes", "none", "null")
"""Words with a meaning of their own where a path is taken."""


def absolute(key: str, value: Any) -> Any:
    """A path as it will be found from any folder: a run starts elsewhere than who launches it."""
    if not isinstance(value, str) or value in _NO_PATHS or value.startswith("builtin:"):
        return value
    is_path = key in _PATHS or (key == "model" and ("/" in value or value.endswith(".json")))
    is_path = is_path and not (key == "model" and is_hub_id(value))  # told by that name
    if is_path and not value.strip():
        # Of no letters it would be the folder that somebody stands in.
        raise UsageError(
            f"--{key.replace('_', '-')} is empty",
            why="it takes a path, and a variable of the shell that is not set leaves none",
            fix="give the path, or leave the option out",
        )
    return str(Path(expand_user(value)).absolute()) if is_path else value


def strongest(layers: Sequence[Layer], key: str) -> Any:
    """What the last layer that has `key` says; None when none has it."""
    return next((layer.values[key] for layer in reversed(layers) if key in layer.values), None)


def deepspeed_layer(layers: Sequence[Layer], machine: Machine) -> tuple[Layer | None, tuple[Problem, ...]]:
    """The options of the DeepSpeed file that the layers name, and its lesser problems.

    Raises UsageError for a fatal one. None when the layers name no file.
    """
    file = strongest(layers, "deepspeed_config")
    if file is None or file == "none":
        return None, ()
    from llmtop.trainer.dsimport.read import import_config  # a fifth of what `plan` takes to start

    path = Path(file)
    imported = import_config(path, world_size=_world_size(layers, machine))
    fatal = [problem for problem in imported.problems if problem.fatal]
    if fatal:
        more = f"; {len(fatal) - 1} more: llmtop import {path}" if len(fatal) > 1 else ""
        raise UsageError(f"{path}: {fatal[0].key}: {fatal[0].what}{more}", fix=fatal[0].fix)
    return Layer(ValueSource.DEEPSPEED_CONFIG, str(path), imported.values), imported.problems


def check_raw_keys(spec: RunSpec) -> None:
    """Raise UsageError, before anything is planned, for raw DeepSpeed keys that a launch would refuse."""
    if spec.options.deepspeed:
        from llmtop.trainer.dsconfig import deepspeed_config  # seldom needed, and slow to import

        deepspeed_config(spec)


def _world_size(layers: Sequence[Layer], machine: Machine) -> int | None:
    """GPUs of the whole job; None where a given number is none, which is refused later."""
    gpus, nodes, all_ = (strongest(layers, name) for name in ("gpus", "nodes", "total_gpus"))
    try:
        if all_ is not None:
            return int(all_)
        return int(machine.gpus if gpus is None else gpus) * int(1 if nodes is None else nodes)
    except ValueError:
        return None
