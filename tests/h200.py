"""The recorded H200 runs as run specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy.rows import first_cell
from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource

ROWS: tuple[dict[str, Any], ...] = tuple(
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "h200-memory.jsonl").read_text().splitlines()
)
_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "memory_matrix.jsonl"
MATRIX: tuple[dict[str, Any], ...] = tuple(json.loads(line) for line in _RESULTS.read_text().splitlines())
"""Runs of `benchmarks/memory_matrix.py` that completed."""
MACHINE = Machine(gpu="h200", gpus=1, host_memory_bytes=None)


def spec_of(row: dict[str, Any]) -> RunSpec:
    values = {"gpu": "h200", **first_cell(row["cell"], row["world"])}
    return resolve(
        [Layer(source=ValueSource.COMMAND_LINE, detail="recorded", values=values)],
        name="recorded",
        machine=MACHINE,
    )


def name_of(row: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in row["cell"].items()) + f" x{row['world']}"


def measured_peak_bytes(row: dict[str, Any]) -> int:
    return max(int(phase[key]) for phase in row["phases"] for key in ("fwd_peak", "bwd_peak", "step_peak"))
