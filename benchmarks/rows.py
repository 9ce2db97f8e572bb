"""JSON lines that a benchmark adds to as it goes and skips when it is started again."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Cell = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Every whole line; one that was torn when the machine went away is passed over."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def key_of(cell: Cell) -> str:
    """The same for the same cell, in whatever order its options are written."""
    return json.dumps(cell, sort_keys=True)


class RowLog:
    """Appends rows; knows which cells it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._done = {key_of(row["cell"]) for row in read_rows(path)}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
            with path.open("a") as log:
                log.write("\n")

    def __contains__(self, cell: Cell) -> bool:
        return key_of(cell) in self._done

    def add(self, row: Row) -> None:
        with self._lock, self.path.open("a") as log:
            log.write(json.dumps(row) + "\n")
            self._done.add(key_of(row["cell"]))
