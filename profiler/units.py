"""Bytes, seconds, counts, rates and percentages: how they are written for people.

An unknown value (None) is written "n/a". Bytes are binary and say so: GiB, never GB.
"""

from __future__ import annotations

import math
import time

NOT_AVAILABLE = "n/a"

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "K", "M", "B", "T")


def _three_digits(value: float) -> str:
    """About three significant digits, without an exponent: 1.50, 23.4, 512."""
    size = abs(value)
    if size < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if size < 99.95 else f"{value:.0f}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    """The value in the largest unit in which it still rounds to at least one."""
    scaled = float(value)
    for unit in units[:-1]:
        if abs(scaled) < base - 0.5:
            return scaled, unit
        scaled /= base
    return scaled, units[-1]


def format_bytes(value: float | None, *, signed: bool = False) -> str:
    """`1.50 GiB`; with `signed`, a plus sign before what is not negative."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    scaled, unit = _scaled(value, 1024, _BINARY)
    number = f"{scaled:.0f}" if unit == "B" else _three_digits(scaled)
    return f"{'+' if signed and value >= 0 else ''}{number} {unit}"


def format_seconds(value: float | None) -> str:
    """`12.3 ms`, `1.23 s`, `1m 15s`, `2h 05m`, `3d 04h`."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    if value < 0:
        return f"-{format_seconds(-value)}"
    if value < 0.9995:
        return f"{_three_digits(value * 1000)} ms" if value >= 0.000995 else f"{value * 1e6:.0f} us"
    if value < 59.95:
        return f"{_three_digits(value)} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def format_count(value: float | None) -> str:
    """`8.03B`, `135M`, `512`: parameters, tokens."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    scaled, unit = _scaled(value, 1000, _DECIMAL)
    if not unit:
        return f"{scaled:.0f}" if float(value).is_integer() or abs(scaled) >= 99.95 else _three_digits(scaled)
    return f"{_three_digits(scaled)}{unit}"


def figures(value: float) -> str:
    """Three significant figures, without an exponent where a person reads the number easier so."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def format_progress(done: int | None, planned: int | None) -> str:
    """Steps made, of those planned where that is known: `12/100`, `12`; `n/a` where the first are not."""
    if done is None:
        return NOT_AVAILABLE
    return str(done) if planned is None else f"{done}/{planned}"


def format_range(low: str, high: str) -> str:
    """`1.10 s to 1.30 s`; once where both ends are written alike."""
    return low if low == high else f"{low} to {high}"


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 rank`, `8 ranks`; `things` where the plural is not made with an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def format_rate(bytes_per_second: float | None) -> str:
    """`323 GiB/s`."""
    text = format_bytes(bytes_per_second)
    return text if text == NOT_AVAILABLE else f"{text}/s"


def format_joules(joules: float | None) -> str:
    """`25.2 kJ`, `0.37 J`."""
    if joules is None or not math.isfinite(joules):
        return NOT_AVAILABLE
    scaled, unit = _scaled(joules, 1000, ("J", "kJ", "MJ", "GJ", "TJ"))
    return f"{_three_digits(scaled)} {unit}"


def format_tokens_rate(tokens_per_second: float | None) -> str:
    """`12.3K tok/s`."""
    text = format_count(tokens_per_second)
    return text if text == NOT_AVAILABLE else f"{text} tok/s"


def format_percent(value: float | None, *, signed: bool = False, digits: int = 1) -> str:
    """`12.5%`; the value is in percent already."""
    if value is None or not math.isfinite(value):
        return NOT_AVAILABLE
    rounded = round(value, digits) + 0.0  # no minus sign before a zero
    return f"{rounded:{'+' if signed else ''}.{digits}f}%"


def format_change(percent: float) -> str:
    """`-50%`, `-0.5%`: a small fall must not read as a rise, so what is rounded to zero has no sign."""
    digits = 0 if abs(percent) >= 1 else 1
    return format_percent(percent, signed=bool(round(percent, digits)), digits=digits)


def format_moment(wall: float | None) -> str:
    """`2026-11-30 12:00:00` in the time of this place, of seconds since the epoch; a record may say any."""
    try:
        return NOT_AVAILABLE if wall is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
    except (OverflowError, OSError, ValueError):
        return NOT_AVAILABLE
