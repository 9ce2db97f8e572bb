"""What a state has besides the optimizer's tensors: random states, schedule, loss scale, hyper-parameters."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from llmtop.trainer.worker.state.layout import StateRefused

Plain = dict[str, Any]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_HYPER = ("lr", "initial_lr", "betas", "eps", "weight_decay")
"""What a group takes from a state; how the update is computed stays as the new optimizer was made."""
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Of `DynamicLossScaler` (deepspeed 0.19.8 `runtime/fp16/loss_scaler.py`) and, but for the last one, of
`LossScaleConfig` there, which the stage-0 wrappers have. Windows and factors come from the configuration."""


def random_tensors(device: torch.device) -> tuple[dict[str, torch.Tensor], Plain]:
    """Every generator that training may draw from: arrays as tensors, the rest plain."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    tensors = {
        "rng.torch": torch.get_rng_state(),
        "rng.numpy": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
        "rng.python": torch.tensor(internal, dtype=torch.int64),
    }
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors, {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python": [version, next_gauss],
    }


def restore_random(tensors: dict[str, torch.Tensor], plain: Plain, device: torch.device) -> None:
    torch.set_rng_state(tensors["rng.torch"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    kind, position, has_gauss, gauss = plain["numpy"]
    keys = tensors["rng.numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state((kind, keys, position, has_gauss, gauss))
    version, next_gauss = plain["python"]
    random.setstate((version, tuple(tensors["rng.python"].tolist()), next_gauss))


def counters(engine: Any) -> dict[str, int]:
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def restore_counters(engine: Any, saved: dict[str, int]) -> None:
    for name in _COUNTERS:
        setattr(engine, name, saved[name])


def schedule(engine: Any) -> Plain | None:
    scheduler = engine.lr_scheduler
    return None if scheduler is None else dict(plain(scheduler.state_dict(), "the learning-rate schedule"))


def loss_scale(scaler: Any) -> Plain | None:
    """None where nothing is scaled by a number that moves."""
    if scaler is None or not _moves(scaler):
        return None
    return {name: plain(getattr(scaler, name), "the loss scale") for name in _SCALE if hasattr(scaler, name)}


def restore_loss_scale(scaler: Any, saved: Plain | None) -> None:
    if saved is None or scaler is None or not _moves(scaler):
        return
    for name, value in saved.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def hyper_parameters(group: dict[str, Any]) -> Plain:
    return {name: plain(group[name], f"the optimizer's {name}") for name in _HYPER if name in group}


def restore_hyper_parameters(group: dict[str, Any], saved: Plain) -> None:
    for name, value in saved.items():
        if name in group:
            group[name] = tuple(value) if isinstance(value, list) else value


def plain(value: Any, what: str) -> Any:
    """The same in types of JSON."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, numpy.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(one, what) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one, what) for key, one in value.items()}
    raise StateRefused(f"{what} cannot be saved", why=f"it holds a {type(value).__name__}")


def _moves(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False))
