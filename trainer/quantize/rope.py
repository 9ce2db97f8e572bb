"""How a model turns positions into angles, as its configuration says it, in what GGUF can hold.

Both spellings of transformers are read: `rope_parameters`, and before 5.0 `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import ModelShape

_THETA = 10_000.0
_THETAS = {"gemma3_text": 1_000_000.0, "mixtral": 1_000_000.0}
"""Where a configuration does not say it and the family's class has another."""
_PHI_PART = 0.5
"""Of a head, where a Phi configuration does not say (`models/phi/configuration_phi.py`)."""
_NO_SCALING = ("default", "none", "")


class Rope(Struct, frozen=True, kw_only=True):
    theta: float
    local_theta: float | None = None
    """Of layers that see a window only, where theirs differs."""
    scaling: str = "none"
    """As GGUF names it: none, linear, yarn, longrope. Llama 3's is a table of factors."""
    factor: float | None = None
    original_positions: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    rotary_part: float = 1.0
    factors: tuple[float, ...] = ()
    """What each frequency is divided by, at any length."""
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    """The same beyond and up to the original number of positions."""


def read_rope(config: dict[str, Any], shape: ModelShape, where: str) -> Rope:
    """Raises UsageError for a scaling that GGUF, or llmtop, has no word for."""
    full, local = _parameters(config)
    theta = _number(full, "rope_theta", _THETAS.get(shape.family, _THETA), where)
    kind = str(full.get("rope_type") or full.get("type") or "default")
    part = _PHI_PART if shape.family == "phi" else 1.0
    plain = Rope(
        theta=theta,
        local_theta=None if local is None else _number(local, "rope_theta", _THETA, where),
        rotary_part=_number(full, "partial_rotary_factor", part, where),
        original_positions=_positions(full, config),
    )
    if kind in _NO_SCALING:
        return plain
    factor = _number(full, "factor", 1.0, where)
    if kind == "linear":
        return _changed(plain, scaling="linear", factor=factor)
    if kind == "llama3":
        return _changed(plain, factors=_llama3(full, theta, shape.head_dim, factor, where))
    if kind == "yarn":
        return _changed(
            plain,
            scaling="yarn",
            factor=factor,
            original_positions=plain.original_positions or shape.max_positions,
            attention_factor=full.get("attention_factor"),
            beta_fast=full.get("beta_fast"),
            beta_slow=full.get("beta_slow"),
        )
    if kind in ("longrope", "su"):
        return _longrope(plain, full, shape, where)
    raise UsageError(
        f"{where}: rope scaling '{kind}' cannot be written to GGUF",
        why="llama.cpp has no such scaling for this family",
        fix="--to int8 or --to nf4, which transformers reads",
    )


def _parameters(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(of every layer, or those that see everything; of layers with a window)."""
    found = config.get("rope_parameters")
    if isinstance(found, dict) and isinstance(found.get("full_attention"), dict):
        local = found.get("sliding_attention")
        return found["full_attention"], local if isinstance(local, dict) else None
    full: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            full[key] = config[key]
    for named in (config.get("rope_scaling"), found):
        if isinstance(named, dict):
            full |= named
    base = config.get("rope_local_base_freq")
    if base is None and config.get("model_type") == "gemma3_text":
        base = _THETA
    return full, None if base is None else {"rope_theta": base}


def _positions(full: dict[str, Any], config: dict[str, Any]) -> int | None:
    found = full.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    return found if isinstance(found, int) else None


def _number(values: dict[str, Any], key: str, default: float, where: str) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise UsageError(f"{where}: rope's {key} = {value!r} is not valid", why="it takes a number above 0")
    return float(value)


def _changed(rope: Rope, **changes: Any) -> Rope:
    from msgspec.structs import replace

    return replace(rope, **changes)


def _llama3(
    full: dict[str, Any], theta: float, head_dim: int, factor: float, where: str
) -> tuple[float, ...]:
    """The factor of each frequency: Llama 3.1's rule (transformers `modeling_rope_utils`, llama3)."""
    low = _number(full, "low_freq_factor", 1.0, where)
    high = _number(full, "high_freq_factor", 4.0, where)
    original = _number(full, "original_max_position_embeddings", 8192, where)
    if high <= low:
        raise UsageError(
            f"{where}: rope's high_freq_factor {high:g} is not above its low_freq_factor {low:g}"
        )
    factors = []
    for index in range(0, head_dim, 2):
        frequency = _single(1 / _single(theta ** _single(index / head_dim)))
        wavelength = _single(_single(1 / frequency) * _single(2 * math.pi))
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            cycles = _single(_single(1 / wavelength) * original)
            smooth = _single(_single(cycles - low) / _single(high - low))
            stretched = _single(_single(1 - smooth) / _single(factor))
            factors.append(_single(1 / _single(stretched + smooth)))
    return tuple(factors)


def _single(number: float) -> float:
    """Rounded to 32 bits, as torch does after each step of the same rule: the last bit then agrees too."""
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found


def _longrope(plain: Rope, full: dict[str, Any], shape: ModelShape, where: str) -> Rope:
    """Phi-3's two tables (arXiv 2402.13753), and what attention is multiplied with for the longer one."""
    tables = [full.get("long_factor"), full.get("short_factor")]
    width = int(shape.head_dim * plain.rotary_part) // 2
    for table in tables:
        if not isinstance(table, list) or len(table) != width or not all(map(_is_factor, table)):
            raise UsageError(
                f"{where}: rope's long_factor and short_factor are not {width} numbers each",
                why="there is one for each pair of rotary dimensions",
            )
    original = plain.original_positions or shape.max_positions or 1
    ratio = (shape.max_positions or original) / original
    scale = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
    given = full.get("attention_factor")
    return _changed(
        plain,
        scaling="longrope",
        original_positions=original,
        attention_factor=scale if given is None else float(given),
        long_factors=tuple(map(float, tables[0] or ())),
        short_factors=tuple(map(float, tables[1] or ())),
    )


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
