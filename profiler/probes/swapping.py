"""What DeepSpeed swaps to a drive: its buffers in host memory, and the files that it has there.

The attribute names are those of deepspeed 0.19.8 (`runtime/swap_tensor/`), read with a default as all of
the engine's are: an absent one means that nothing is swapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from llmtop.profiler.memory.result import Component

_DRIVE = "nvme"


def swap_buffers(wrapper: Any, parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """Tensors in host memory through which weights and optimizer states go. `wrapper` is the engine's."""
    manager = getattr(getattr(wrapper, "optimizer_swapper", None), "swap_buffer_manager", None)
    yield from getattr(manager, "all_buffers", ())
    swapper = _param_swapper(parameters)
    for name in ("buffers", "partitioned_swap_buffer"):
        buffer = getattr(swapper, name, None)
        if isinstance(buffer, torch.Tensor):
            yield buffer


def on_drive_bytes(wrapper: Any, parameters: Iterable[torch.nn.Parameter]) -> dict[str, int]:
    """Component to the bytes of this rank's files of it; empty where nothing lies on a drive."""
    found = {
        Component.PARAMETERS: _bytes_of(_param_files(parameters)),
        **{component: _bytes_of(files) for component, files in _state_files(wrapper).items()},
    }
    return {component: size for component, size in found.items() if size}


def _param_swapper(parameters: Iterable[torch.nn.Parameter]) -> Any:
    """One for all weights of a rank."""
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in parameters)
    return next((swapper for swapper in swappers if swapper is not None), None)


def _param_files(parameters: Iterable[torch.nn.Parameter]) -> set[str]:
    """Of weights that live on the drive: one that stays in memory was written there too, and is not read."""
    found = set()
    for parameter in parameters:
        shard, swapper = getattr(parameter, "ds_tensor", None), getattr(parameter, "nvme_swapper", None)
        if swapper is not None and getattr(shard, "final_location", None) == _DRIVE:
            path = swapper.id_to_path.get(getattr(parameter, "ds_id", None))
            found |= {path} if path is not None else set()
    return found


def _state_files(wrapper: Any) -> dict[str, set[str]]:
    """Of each sub-group the fp32 weights come first, then what the optimizer keeps of them."""
    master: set[str] = set()
    states: set[str] = set()
    infos = getattr(getattr(wrapper, "optimizer_swapper", None), "swap_params_info", {})
    for info in list(infos.values()):
        first, *others = (str(tensor.swap_path) for tensor in info.tensors)
        master.add(first)
        states.update(others)
    return {Component.MASTER_PARAMETERS: master, Component.OPTIMIZER_STATE: states}


def _bytes_of(paths: Iterable[str]) -> int:
    total = 0
    for path in paths:
        try:
            total += Path(path).stat().st_size
        except FileNotFoundError:
            continue  # DeepSpeed has named it and not yet written it
    return total
