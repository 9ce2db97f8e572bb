"""The DeepSpeed keys that set memory, typed, with the defaults of the tested series.

Defaults are those of deepspeed 0.19.8, `runtime/zero/config.py:DeepSpeedZeroConfig` and
`runtime/zero/offload_config.py`. "auto" is filled as transformers 5.x fills it
(`integrations/deepspeed.py:HfTrainerDeepSpeedConfig.trainer_config_finalize`): bucket h*h,
prefetch 0.9*h*h, persistence threshold 10*h.
"""

from __future__ import annotations

import sys
from typing import Any

from msgspec import Struct

from llmtop.presets.errors import bad_value
from llmtop.presets.truth import is_false, truth


class ZeroSettings(Struct, frozen=True, kw_only=True):
    """Sizes are in elements, as DeepSpeed counts them, not bytes."""

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    """Defaults to true at stage 3 only."""
    contiguous_gradients: bool = True
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    optimizer_pin_memory: bool = True
    param_pin_memory: bool = True
    grad_accum_dtype: str | None = None
    """None: the model's precision."""
    hpz_partition_size: int = 1
    """ZeRO++: ranks that hold a secondary 16-bit shard together; 1 is off."""


_DEFAULTS = ZeroSettings()
_STAGE3_DEFAULTS = ZeroSettings(overlap_comm=True)


_SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)
"""Those that DeepSpeed names as they are named here."""


def zero_settings(stage: int, raw: dict[str, Any], hidden_size: int) -> ZeroSettings:
    """Read the memory-relevant keys out of raw DeepSpeed keys.

    `raw` is the merged DeepSpeed dictionary (only keys that a person gave). Both spellings of the
    stage-3 keys (`stage3_x` and `x`) are read. Raises UsageError on a value that is not a number.
    """
    if not raw:
        return _STAGE3_DEFAULTS if stage == 3 else _DEFAULTS
    zero = _block(raw, "zero_optimization")
    auto = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "param_persistence_threshold": 10 * hidden_size,
    }
    sizes: dict[str, Any] = {key: _size(zero, key, getattr(_DEFAULTS, key), auto.get(key)) for key in _SIZES}
    accum = _block(raw, "data_types").get("grad_accum_dtype")
    return ZeroSettings(
        **sizes,
        overlap_comm=_switch(zero, "overlap_comm", stage == 3),
        contiguous_gradients=_switch(zero, "contiguous_gradients", True),
        optimizer_pin_memory=not is_false(_block(zero, "offload_optimizer").get("pin_memory")),
        param_pin_memory=not is_false(_block(zero, "offload_param").get("pin_memory")),
        grad_accum_dtype=accum if isinstance(accum, str) and accum != "auto" else None,
        hpz_partition_size=max(1, _size(zero, "zero_hpz_partition_size", 1)),
    )


def _block(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """A table in raw keys; an empty one where there is none."""
    given = raw.get(key)
    return given if isinstance(given, dict) else {}


def _size(zero: dict[str, Any], key: str, default: int, auto: int | None = None) -> int:
    value = zero.get(f"stage3_{key}", zero.get(key, default))
    if value == "auto":
        return default if auto is None else auto
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise bad_value("deepspeed.zero_optimization", key, value, "a number of elements")
    return int(value)


def _switch(zero: dict[str, Any], key: str, default: bool) -> bool:
    value = zero.get(key, default)
    if value is None or value == "auto":
        return default
    said = truth(value)
    if said is None:
        raise bad_value("deepspeed.zero_optimization", key, value, "true or false")
    return said
