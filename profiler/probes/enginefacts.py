"""What a DeepSpeed engine says of the step that it makes (deepspeed 0.19.8 `runtime/engine.py`)."""

from __future__ import annotations

from typing import Any


def learning_rate(engine: Any) -> float | None:
    """What the coming update uses; the schedule changes it right after."""
    rates = engine.get_lr()
    return float(rates[0]) if rates else None


def loss_scale(engine: Any) -> float | None:
    """None where nothing is scaled."""
    if not engine.fp16_enabled():
        return None
    scale = getattr(engine.optimizer, "loss_scale", None)
    scale = scale if scale is not None else getattr(engine.optimizer, "cur_scale", None)
    return None if scale is None else float(scale)
