"""Numbers in columns that add up as they are printed, not only before rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from llmtop.profiler.units import NOT_AVAILABLE


class ColumnUnit(Struct, frozen=True, kw_only=True):
    """One unit for a whole column, so that rows can be compared and added by eye."""

    name: str
    size_bytes: int
    decimals: int

    @property
    def quantum_bytes(self) -> float:
        """The last digit that is printed."""
        return float(self.size_bytes / 10**self.decimals)


MIB = ColumnUnit(name="MiB", size_bytes=1024**2, decimals=1)
GIB = ColumnUnit(name="GiB", size_bytes=1024**3, decimals=2)


def unit_for(largest_bytes: int) -> ColumnUnit:
    return GIB if largest_bytes >= 8 * GIB.size_bytes else MIB


def print_addends(values: Sequence[int | None], unit: ColumnUnit) -> tuple[list[str], str]:
    """The values and their sum as text, rounded so that the printed values add up to the printed sum.

    Each is rounded down to the last digit; the digits that are then missing from the rounded sum go
    to the values that lost most. An unknown value prints as n/a and adds nothing.
    """
    known = [value for value in values if value is not None]
    if not known:
        return [NOT_AVAILABLE for _ in values], NOT_AVAILABLE
    total = round(sum(known) / unit.quantum_bytes)
    digits = {at: math.floor(v / unit.quantum_bytes) for at, v in enumerate(values) if v is not None}
    lost = {at: (values[at] or 0) / unit.quantum_bytes - kept for at, kept in digits.items()}
    missing = total - sum(digits.values())
    for at in sorted(lost, key=lambda at: (-lost[at], at))[:missing]:
        digits[at] += 1
    texts = [_digits(digits[at], unit) if at in digits else NOT_AVAILABLE for at in range(len(values))]
    return texts, _digits(total, unit)


def print_one(value: int | None, unit: ColumnUnit) -> str:
    return NOT_AVAILABLE if value is None else _digits(round(value / unit.quantum_bytes), unit)


def _digits(quanta: int, unit: ColumnUnit) -> str:
    return f"{quanta / 10**unit.decimals:,.{unit.decimals}f}"
