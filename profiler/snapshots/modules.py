"""Memory and time of each module of a model over one step, with the layers of one kind in one row."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class ModuleRow(Struct, frozen=True, kw_only=True):
    """Sums over all modules of one kind and all micro-batches of a step."""

    name: str
    """`*` stands for the number of a layer."""
    kind: str
    """Class."""
    modules: int = 1
    calls: int = 0
    forward_seconds: float = 0.0
    """With the modules inside it; so with the rest that follows."""
    backward_seconds: float | None = None
    """None where no gradient goes in or comes out that could be timed."""
    parameter_bytes: int = 0
    """That this rank holds now."""
    saved_bytes: int = 0
    """Kept for the backward pass at the end of the last micro-batch's forward pass, each storage once."""


class ModuleTable(Struct, frozen=True, kw_only=True, tag="modules"):
    schema_version: int = 1
    rank: int
    step: int
    step_seconds: float
    """Of the step that was looked at, which is slower than others."""
    rows: tuple[ModuleRow, ...]


def by_kind(rows: Iterable[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Rows of modules that differ in numbers of their names alone put together; in the order of the model."""
    found: dict[tuple[str, str], ModuleRow] = {}
    for row in rows:
        key = (_NUMBER.sub("*", row.name), row.kind)
        found[key] = row_sum(key[0], found[key], row) if key in found else renamed(key[0], row)
    return tuple(found.values())


def renamed(name: str, row: ModuleRow) -> ModuleRow:
    return row_sum(name, ModuleRow(name=name, kind=row.kind, modules=0), row)


def row_sum(name: str, first: ModuleRow, second: ModuleRow) -> ModuleRow:
    timed = [one.backward_seconds for one in (first, second) if one.backward_seconds is not None]
    return ModuleRow(
        name=name,
        kind=first.kind,
        modules=first.modules + second.modules,
        calls=first.calls + second.calls,
        forward_seconds=first.forward_seconds + second.forward_seconds,
        backward_seconds=sum(timed) if timed else None,
        parameter_bytes=first.parameter_bytes + second.parameter_bytes,
        saved_bytes=first.saved_bytes + second.saved_bytes,
    )
