"""Printing that several commands share: one JSON object, and aligned columns of text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


def print_json(value: object) -> None:
    """Indented, so that a person can read it too; keys in the order of the struct."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with columns padded to the widest cell; the columns named in `right` end aligned."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
